-- Groups: policy, start, pause and resume.

-- The columns of a group that are its policy: all but its name, its bindings and its state. They have the defaults and
-- the bounds of the settings.
CREATE FUNCTION custody.policy_columns() RETURNS TABLE (name text, needed boolean)
LANGUAGE sql STABLE AS $$
    SELECT attname::text, attnotnull FROM pg_attribute
    WHERE attrelid = 'custody.groups'::regclass AND attnum > 0 AND NOT attisdropped
      AND attname <> ALL ('{group_id, topic_id, name, bare, bindings, matcher, binding_no, breaker_state, breaker_since,
                            breaker_reason, probe_at, probe_lease, paused_at, paused_reason, created_at}')
    ORDER BY attnum
$$;

-- Refuses a policy of the wrong form, and names what is wrong.
CREATE FUNCTION custody.require_policy(p_policy jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_wrong text;
BEGIN
    IF p_policy IS NULL OR jsonb_typeof(p_policy) <> 'object' THEN
        PERFORM custody.refuse('invalid_policy', 'a policy is an object', 'For example {"max_attempts": 3}.');
    END IF;
    SELECT string_agg(k, ', ' ORDER BY k) INTO v_wrong
    FROM jsonb_object_keys(p_policy) k WHERE k NOT IN (SELECT name FROM custody.policy_columns());
    IF v_wrong IS NOT NULL THEN
        PERFORM custody.refuse('invalid_policy', format('a policy has no %s', v_wrong),
            format('It has %s.', (SELECT string_agg(name, ', ') FROM custody.policy_columns())));
    END IF;
    SELECT string_agg(name, ', ') INTO v_wrong
    FROM custody.policy_columns() WHERE needed AND p_policy -> name = 'null';
    IF v_wrong IS NOT NULL THEN
        PERFORM custody.refuse('invalid_policy', format('the policy has no value for %s', v_wrong),
            'Give one, or leave it out.');
    END IF;
END $$;

-- Writes what the policy names and leaves the rest.
CREATE FUNCTION custody.set_policy(p_group custody.groups, p_policy jsonb) RETURNS custody.groups
LANGUAGE plpgsql AS $$
DECLARE
    v_columns text := (SELECT string_agg(quote_ident(k), ', ') FROM jsonb_object_keys(p_policy) k);
BEGIN
    IF v_columns IS NOT NULL THEN
        EXECUTE format('UPDATE custody.groups SET (%1$s) = '
                       '(SELECT %1$s FROM jsonb_populate_record(NULL::custody.groups, $1)) '
                       'WHERE group_id = $2 RETURNING *', v_columns)
        INTO p_group USING p_policy, p_group.group_id;
    END IF;
    PERFORM custody.require_one_look(p_group);
    RETURN p_group;
END $$;

CREATE FUNCTION custody.create_group(
    p_topic text, p_group text, p_policy jsonb DEFAULT '{}', p_start text DEFAULT 'earliest',
    p_start_offset bigint DEFAULT NULL, p_start_time timestamptz DEFAULT NULL, p_bare boolean DEFAULT false,
    p_bindings jsonb DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS custody.groups
LANGUAGE plpgsql AS $$
DECLARE
    v_now     timestamptz;
    v_topic   custody.topics;
    v_group   custody.groups;
    v_bound   record;
    v_head    custody.heads;
    v_start   bigint;
BEGIN
    IF p_group IS NULL OR p_group !~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$' THEN
        PERFORM custody.refuse('invalid_argument', format('%L cannot be the name of a group', p_group),
            'Use 1 to 200 letters, digits, dots, dashes and underscores, starting with a letter, digit or underscore.');
    END IF;
    PERFORM custody.require_policy(p_policy);
    v_bound := custody.compile_bindings(p_bindings);
    IF p_bare AND v_bound.bindings IS NOT NULL THEN
        PERFORM custody.refuse('invalid_argument', 'a bare group cannot be bound: it is a cursor over every message',
            'Give it a lifecycle, or read only what you need of what you fetch.');
    END IF;
    -- Retention takes this lock too: no segment is dropped while a group is placed on it.
    v_topic := custody.lock_topic(p_topic);
    v_now := coalesce(p_now, clock_timestamp());
    INSERT INTO custody.groups (topic_id, name, bare, bindings, matcher, created_at)
    VALUES (v_topic.topic_id, p_group, p_bare, v_bound.bindings, v_bound.matcher, v_now)
    ON CONFLICT (topic_id, name) DO NOTHING
    RETURNING * INTO v_group;
    IF NOT FOUND THEN
        PERFORM custody.refuse('group_exists', format('topic %L has a group %L already', p_topic, p_group),
            'Use it, change its policy (update_group), or choose another name.');
    END IF;
    IF NOT p_bare THEN
        v_group := custody.set_policy(v_group, p_policy);
    END IF;
    IF v_group.dead_letter = 'topic' THEN
        PERFORM custody.dead_letter_topic(v_topic, v_now);
    END IF;
    FOR v_head IN SELECT * FROM custody.heads WHERE topic_id = v_topic.topic_id ORDER BY partition LOOP
        v_start := CASE p_start
            WHEN 'earliest' THEN v_head.first_offset
            WHEN 'latest' THEN (custody.tail(v_head)).next_offset
            WHEN 'offset' THEN p_start_offset
            WHEN 'time' THEN custody.offset_at(v_head, p_start_time)
        END;
        IF v_start IS NULL THEN
            PERFORM custody.refuse('invalid_argument', format('a group cannot start at %L', p_start),
                'Start at earliest, latest, an offset or a time.');
        END IF;
        PERFORM custody.require_offset(p_topic, v_head, v_start);
        INSERT INTO custody.cursors VALUES (v_group.group_id, v_head.partition);
        INSERT INTO custody.frontiers VALUES (v_group.group_id, v_head.partition, 0, v_start, 1);
        INSERT INTO custody.journal (at, kind, group_id, partition, offsets)
        VALUES (v_now, 'start', v_group.group_id, v_head.partition, int8multirange(int8range(0, v_start)));
    END LOOP;
    RETURN v_group;
END $$;

CREATE FUNCTION custody.require_offset(p_topic text, p_head custody.heads, p_offset bigint) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_next bigint := (custody.tail(p_head)).next_offset;
BEGIN
    IF p_offset < (p_head).first_offset OR p_offset > v_next THEN
        PERFORM custody.refuse('offset_out_of_range',
            format('%s/%s has no offset %s: it goes from %s to %s', p_topic, (p_head).partition, p_offset,
                   (p_head).first_offset, v_next),
            'Choose an offset in that range, or earliest or latest.');
    END IF;
END $$;

CREATE FUNCTION custody.update_group(
    p_topic text, p_group text, p_policy jsonb, p_actor text DEFAULT NULL, p_now timestamptz DEFAULT NULL
)
RETURNS custody.groups
LANGUAGE plpgsql AS $$
DECLARE
    v_now   timestamptz;
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
BEGIN
    PERFORM custody.require_policy(p_policy);
    IF p_policy ? 'ordering' AND p_policy ->> 'ordering' <> v_group.ordering THEN
        PERFORM custody.refuse('invalid_argument', 'the ordering of a group cannot be changed',
            'Create a second group with the other ordering.');
    END IF;
    IF p_policy ->> 'dead_letter' = 'topic' THEN
        PERFORM custody.dead_letter_topic(custody.lock_topic(p_topic), coalesce(p_now, clock_timestamp()));
    END IF;
    SELECT * INTO v_group FROM custody.groups WHERE group_id = v_group.group_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM custody.group_named(p_topic, p_group);
    END IF;
    v_now := coalesce(p_now, clock_timestamp());
    v_group := custody.set_policy(v_group, p_policy);
    IF v_group.breaker_rate IS NULL AND v_group.breaker_state <> 'closed' THEN
        PERFORM custody.set_breaker(v_group, 'closed', NULL, v_now);
        SELECT * INTO v_group FROM custody.groups WHERE group_id = v_group.group_id;
    END IF;
    INSERT INTO custody.journal (at, kind, group_id, worker, detail)
    VALUES (v_now, 'policy', v_group.group_id, p_actor, p_policy);
    RETURN v_group;
END $$;

CREATE FUNCTION custody.delete_group(p_topic text, p_group text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_group custody.groups := custody.group_named(p_topic, p_group);
BEGIN
    PERFORM custody.require_read_committed();
    PERFORM custody.lock_group(v_group.group_id);
    IF EXISTS (SELECT FROM custody.pipeline_writes w WHERE w.group_id = v_group.group_id AND w.committed) THEN
        PERFORM custody.refuse('conflict', format('group %L has results that are committed and not shown yet', p_group),
            'Run its pipeline once more: it shows them first.');
    END IF;
    PERFORM custody.remove_group(v_group.group_id);
END $$;

CREATE FUNCTION custody.remove_group(p_group_id int) RETURNS void
LANGUAGE sql AS $$
    DELETE FROM custody.leases WHERE group_id = p_group_id;
    DELETE FROM custody.cases WHERE group_id = p_group_id;
    DELETE FROM custody.frontiers WHERE group_id = p_group_id;
    DELETE FROM custody.groups WHERE group_id = p_group_id
$$;

-- Locks all that a claim or settle locks before it writes rows that refer to the group: after this none of them is
-- under way.
CREATE FUNCTION custody.lock_group(p_group_id int) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM custody.pipelines WHERE group_id = p_group_id FOR UPDATE;
    PERFORM 1 FROM custody.cursors WHERE group_id = p_group_id ORDER BY partition FOR UPDATE;
    PERFORM 1 FROM custody.leases WHERE group_id = p_group_id ORDER BY partition, claim_no, part FOR UPDATE;
END $$;

CREATE FUNCTION custody.pause(
    p_topic text, p_group text, p_reason text DEFAULT NULL, p_actor text DEFAULT NULL, p_now timestamptz DEFAULT NULL
)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_now   timestamptz;
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
BEGIN
    PERFORM 1 FROM custody.groups WHERE group_id = v_group.group_id FOR NO KEY UPDATE;
    v_now := coalesce(p_now, clock_timestamp());
    UPDATE custody.groups SET paused_at = v_now, paused_reason = p_reason
    WHERE group_id = v_group.group_id AND paused_at IS NULL;
    IF FOUND THEN
        INSERT INTO custody.journal (at, kind, group_id, worker, error)
        VALUES (v_now, 'pause', v_group.group_id, p_actor, p_reason);
        RETURN true;
    END IF;
    RETURN false;
END $$;

-- Resumes after a pause, or after the circuit breaker has opened. Returns false if there was nothing to resume.
CREATE FUNCTION custody.resume(p_topic text, p_group text, p_actor text DEFAULT NULL, p_now timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_now   timestamptz;
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
BEGIN
    SELECT * INTO v_group FROM custody.groups WHERE group_id = v_group.group_id FOR NO KEY UPDATE;
    v_now := coalesce(p_now, clock_timestamp());
    IF v_group.paused_at IS NULL AND v_group.breaker_state = 'closed' THEN
        RETURN false;
    END IF;
    UPDATE custody.groups SET paused_at = NULL, paused_reason = NULL WHERE group_id = v_group.group_id;
    IF v_group.breaker_state <> 'closed' THEN
        PERFORM custody.set_breaker(v_group, 'closed', NULL, v_now);
    END IF;
    INSERT INTO custody.journal (at, kind, group_id, worker) VALUES (v_now, 'resume', v_group.group_id, p_actor);
    RETURN true;
END $$;
