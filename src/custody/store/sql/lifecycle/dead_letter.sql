-- Dead-letter topics. With dead_letter = 'topic' a message that dies leaves a copy in <topic>-dlq, in the same
-- transaction. Heads are the last locks of all: so a verb collects the deaths, and copies them in its last step.

-- The dead-letter topic of a topic, locked. If there is none, it is created with as many partitions.
CREATE FUNCTION custody.dead_letter_topic(p_topic custody.topics, p_now timestamptz) RETURNS custody.topics
LANGUAGE plpgsql AS $$
DECLARE
    v_name text := (p_topic).name || '-dlq';
    v_dlq  custody.topics;
BEGIN
    IF (p_topic).name LIKE '%-dlq' THEN
        PERFORM custody.refuse('invalid_argument',
            format('topic %L is a dead-letter topic: what dies in it is not copied again', (p_topic).name),
            'Use dead_letter = keep for its groups.');
    ELSIF length(v_name) > 200 THEN
        PERFORM custody.refuse('invalid_argument',
            format('the dead-letter topic %L would have a name of more than 200 characters', v_name),
            'Use dead_letter = keep, or a topic with a shorter name.');
    END IF;
    LOOP
        SELECT * INTO v_dlq FROM custody.topics WHERE name = v_name FOR NO KEY UPDATE;
        IF FOUND THEN
            RETURN v_dlq;
        END IF;
        BEGIN
            RETURN custody.create_topic(v_name, (p_topic).partitions, NULL, p_now);
        EXCEPTION WHEN SQLSTATE 'CY000' THEN
            NULL;       -- somebody else has created it
        END;
    END LOOP;
END $$;

-- A dead-letter topic to which a group writes cannot be deleted.
CREATE FUNCTION custody.require_unused(p_topic custody.topics) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_writer text;
BEGIN
    SELECT format('group %L of topic %L', g.name, t.name) INTO v_writer
    FROM custody.topics t JOIN custody.groups g USING (topic_id)
    WHERE (p_topic).name LIKE '%-dlq' AND t.name = left((p_topic).name, -4) AND g.dead_letter = 'topic'
    ORDER BY g.name LIMIT 1;
    IF FOUND THEN
        PERFORM custody.refuse('conflict', format('%s writes its dead letters to topic %L', v_writer, (p_topic).name),
            'Change its policy to dead_letter = keep (update_group) first, or delete the group.');
    END IF;
END $$;

CREATE FUNCTION custody.iso_time(p_time timestamptz) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT to_char(p_time AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
$$;

CREATE TYPE custody.death AS (
    partition int,
    "offset"  bigint,
    key       text,
    headers   jsonb            -- what the copy says about the death
);

-- What is known of messages that have just died, before anything else happens to them. Each error has 300 characters:
-- people read them in the copy, and the case keeps the full text.
CREATE FUNCTION custody.deaths(p_group custody.groups, p_partition int, p_offsets bigint[]) RETURNS custody.death[]
LANGUAGE sql VOLATILE AS $$
    SELECT array_agg(ROW(c.partition, c."offset", c.key, jsonb_build_object(
               'x-custody-dlq-reason', c.dead_reason,
               'x-custody-original-topic', t.name,
               'x-custody-original-partition', c.partition::text,
               'x-custody-original-offset', c."offset"::text,
               'x-custody-consumer-group', (p_group).name,
               'x-custody-delivery-attempts', c.attempts::text,
               'x-custody-first-failure', custody.iso_time(c.first_failure),
               'x-custody-last-failure', custody.iso_time(c.updated_at),
               'x-custody-failure-errors', (SELECT jsonb_agg(left(e.error, 300) ORDER BY e.n)::text
                                            FROM unnest(c.errors) WITH ORDINALITY e (error, n))))::custody.death
           ORDER BY c."offset")
    FROM custody.cases c JOIN custody.topics t ON t.topic_id = (p_group).topic_id
    WHERE c.group_id = (p_group).group_id AND c.partition = p_partition AND c."offset" = ANY (p_offsets)
$$;

-- The partitions of the copies: by key, or the same as in the source.
CREATE FUNCTION custody.death_places(p_group custody.groups, p_deaths custody.death[])
RETURNS TABLE (topic_id int, partition int, source_partition int, source_offset bigint, headers jsonb, n bigint)
LANGUAGE sql VOLATILE AS $$
    SELECT d.topic_id, coalesce(custody.partition_for(x.key, d.partitions), x.partition % d.partitions), x.partition,
           x."offset", x.headers, x.n
    FROM custody.topics t JOIN custody.topics d ON d.name = t.name || '-dlq'
    CROSS JOIN unnest(p_deaths) WITH ORDINALITY x (partition, "offset", key, headers, n)
    WHERE t.topic_id = (p_group).topic_id
$$;

-- Locks the heads that the copies need, and p_topics and p_partitions with them, in one order.
CREATE FUNCTION custody.lock_copies(
    p_group custody.groups, p_deaths custody.death[], p_topics int[] DEFAULT '{}', p_partitions int[] DEFAULT '{}'
)
RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM custody.heads h
    WHERE (h.topic_id, h.partition) IN (
        SELECT d.topic_id, d.partition FROM custody.death_places(p_group, p_deaths) d
        UNION
        SELECT abs(w.topic_id), w.partition FROM unnest(p_topics, p_partitions) w (topic_id, partition))
    ORDER BY h.topic_id, h.partition FOR UPDATE;
END $$;

-- Appends the copies, in the order of the deaths. The max_depth of the topic does not apply: refusing the copy would
-- undo the death.
CREATE FUNCTION custody.copy_dead(p_group custody.groups, p_deaths custody.death[], p_now timestamptz) RETURNS void
LANGUAGE plpgsql SET plan_cache_mode = auto AS $$
DECLARE
    v_dlq   custody.topics;
    v_batch record;
BEGIN
    LOOP
        SELECT d.* INTO v_dlq FROM custody.topics t JOIN custody.topics d ON d.name = t.name || '-dlq'
        WHERE t.topic_id = (p_group).topic_id;
        IF NOT FOUND THEN
            RETURN;     -- the policy was changed since, and then the topic was deleted
        END IF;
        PERFORM custody.lock_copies(p_group, p_deaths);
        -- The topic may have been made anew while this call waited. Under its heads it does not change.
        EXIT WHEN EXISTS (SELECT FROM custody.topics WHERE topic_id = v_dlq.topic_id AND partitions = v_dlq.partitions);
    END LOOP;
    FOR v_batch IN
        SELECT h AS head, array_agg(e.key ORDER BY d.n) AS keys, array_agg(e.kind ORDER BY d.n) AS kinds,
               array_agg(e.payload ORDER BY d.n) AS payloads,
               array_agg((coalesce(e.headers, '{}') || d.headers)::text ORDER BY d.n) AS headers
        FROM custody.death_places(p_group, p_deaths) d
        JOIN custody.heads h ON h.topic_id = v_dlq.topic_id AND h.partition = d.partition
        JOIN (SELECT h.partition AS source_partition, x.*
              FROM (SELECT y.partition, range_agg(int8range(y."offset", y."offset" + 1)) AS offsets
                    FROM unnest(p_deaths) y GROUP BY y.partition) s
              JOIN custody.heads h ON h.topic_id = (p_group).topic_id AND h.partition = s.partition
              CROSS JOIN LATERAL custody.events_in(h, s.offsets) x) e
            ON e.source_partition = d.source_partition AND e."offset" = d.source_offset
        GROUP BY h.topic_id, h.partition ORDER BY h.partition
    LOOP
        PERFORM custody.put_at_head(v_batch.head, v_batch.keys, v_batch.kinds, v_batch.payloads, v_batch.headers,
                                       p_now);
    END LOOP;
END $$;
