-- The arguments of verbs: topics, groups and partitions are found by name, or refused.

CREATE FUNCTION custody.topic_named(p_topic text) RETURNS custody.topics
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_topic custody.topics;
BEGIN
    SELECT * INTO v_topic FROM custody.topics WHERE name = p_topic;
    IF NOT FOUND THEN
        IF right(p_topic, 4) = '-dlq' AND EXISTS (SELECT FROM custody.topics WHERE name = left(p_topic, -4)) THEN
            PERFORM custody.refuse('topic_not_found',
                format('there is no topic %L: no group of %L sends its dead letters to a topic', p_topic,
                       left(p_topic, -4)),
                format('Give a group of %L the policy dead_letter "topic", which creates it. '
                       'Dead letters of other groups are kept in place: '
                       'list and redrive them there (dead, redrive).', left(p_topic, -4)));
        END IF;
        PERFORM custody.refuse('topic_not_found', format('there is no topic %L', p_topic),
            'Create it first (create_topic), or look at the list of topics for the right spelling.');
    END IF;
    RETURN v_topic;
END $$;

-- Gives a new table the grants of another one. It is made by a function that runs as the owner of the schema.
CREATE FUNCTION custody.grant_as(p_table text, p_like regclass) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_to record;
BEGIN
    FOR v_to IN
        SELECT a.grantee, string_agg(a.privilege_type, ', ') AS privileges
        FROM pg_class c, aclexplode(c.relacl) a WHERE c.oid = p_like AND a.grantee NOT IN (0, c.relowner) GROUP BY 1
    LOOP
        EXECUTE format('GRANT %s ON custody.%I TO %s', v_to.privileges, p_table, v_to.grantee::regrole);
    END LOOP;
END $$;

-- The lock between those who place a group on the log and those who seal or drop its segments. It does not conflict
-- with a foreign key to the topic: a publish that holds a head must not wait here for somebody who waits for that head.
CREATE FUNCTION custody.lock_topic(p_topic text) RETURNS custody.topics
LANGUAGE plpgsql AS $$
DECLARE
    v_topic custody.topics;
BEGIN
    PERFORM custody.require_read_committed();
    LOOP
        SELECT * INTO v_topic FROM custody.topics WHERE name = p_topic FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        PERFORM custody.topic_named(p_topic);
    END LOOP;
    RETURN v_topic;
END $$;

CREATE FUNCTION custody.group_named(p_topic text, p_group text) RETURNS custody.groups
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_group custody.groups;
BEGIN
    SELECT g.* INTO v_group
    FROM custody.topics t JOIN custody.groups g USING (topic_id)
    WHERE t.name = p_topic AND g.name = p_group;
    IF NOT FOUND THEN
        PERFORM custody.topic_named(p_topic);
        PERFORM custody.refuse('group_not_found', format('topic %L has no group %L', p_topic, p_group),
            'Create it first (create_group), or look at the list of groups for the right spelling.');
    END IF;
    RETURN v_group;
END $$;

-- A group with a lifecycle. Verbs that claim, settle and repair refuse a bare group.
CREATE FUNCTION custody.lifecycle_group(p_topic text, p_group text) RETURNS custody.groups
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_group custody.groups := custody.group_named(p_topic, p_group);
BEGIN
    IF v_group.bare THEN
        PERFORM custody.refuse('bare_group',
            format('group %L of topic %L is bare: it has a cursor and no lifecycle', p_group, p_topic),
            'Use fetch and commit with it, or create the group with a policy.');
    END IF;
    RETURN v_group;
END $$;

CREATE FUNCTION custody.require_partition(p_topic custody.topics, p_partition int) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_partition IS NULL OR p_partition < 0 OR p_partition >= (p_topic).partitions THEN
        PERFORM custody.refuse('partition_not_found',
            format('topic %L has no partition %s', (p_topic).name, coalesce(p_partition::text, 'NULL')),
            format('Its partitions are 0 to %s.', (p_topic).partitions - 1));
    END IF;
END $$;

-- Refuses a message that a reader could not decode. Its kind is j (JSON), t (text) or b (bytes), and its headers are
-- texts. This is for callers from SQL: clients encode messages themselves, and give p_of.
CREATE FUNCTION custody.require_message(p_kind text, p_payload bytea, p_headers jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_kind IS NULL OR p_kind NOT IN ('j', 't', 'b') THEN
        PERFORM custody.refuse('invalid_argument', format('a message cannot be of the kind %L', p_kind),
            'It is j (JSON), t (text) or b (bytes).');
    ELSIF p_payload IS NULL THEN
        PERFORM custody.refuse('invalid_argument', 'a message needs a payload', 'JSON''s null is one: ''null''.');
    ELSIF p_headers IS NOT NULL AND (jsonb_typeof(p_headers) <> 'object' OR EXISTS (
        SELECT FROM jsonb_each(CASE jsonb_typeof(p_headers) WHEN 'object' THEN p_headers END) h
        WHERE jsonb_typeof(h.value) <> 'string'))
    THEN
        PERFORM custody.refuse('invalid_argument', 'headers are an object of texts', 'For example {"source": "shop"}.');
    END IF;
    BEGIN
        IF p_kind = 'j' THEN
            PERFORM convert_from(p_payload, 'UTF8')::json;
        -- A text may contain NUL; a text of PostgreSQL may not.
        ELSIF p_kind = 't' AND position('\x00'::bytea IN p_payload) = 0 THEN
            PERFORM convert_from(p_payload, 'UTF8');
        END IF;
    EXCEPTION WHEN data_exception THEN
        PERFORM custody.refuse('invalid_payload',
            format('the payload is not %s: %s', CASE p_kind WHEN 'j' THEN 'JSON' ELSE 'text in UTF-8' END, SQLERRM),
            'Correct it, or publish it as bytes (kind b).');
    END;
END $$;
