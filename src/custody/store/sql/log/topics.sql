-- Topics, their segments, and the end of a partition.

-- The stable hash of a key: the first eight bytes of SHA-256 of the key in UTF-8, read as a big-endian number without
-- its sign bit, modulo the number of partitions.
CREATE FUNCTION custody.partition_for(p_key text, p_partitions int) RETURNS int
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT ((('x' || encode(substr(sha256(convert_to(p_key, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint
             & 9223372036854775807) % p_partitions)::int
$$;

-- Creates the table of a segment and attaches it. ATTACH does not wait for readers of the log; CREATE … PARTITION OF
-- would.
CREATE FUNCTION custody.open_segment(p_topic_id int, p_now timestamptz) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_segment int;
BEGIN
    INSERT INTO custody.segments (topic_id, created_at) VALUES (p_topic_id, p_now) RETURNING segment_id INTO v_segment;
    EXECUTE format(
        'CREATE TABLE custody.log_%1$s (LIKE custody.log INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE,
                                        CHECK (segment_id IS NOT NULL AND segment_id = %1$s),
                                        PRIMARY KEY (partition, "offset"))', v_segment);
    EXECUTE format('CREATE INDEX ON custody.log_%1$s (partition, "offset") WHERE n > 1', v_segment);
    EXECUTE format('ALTER TABLE custody.log ATTACH PARTITION custody.log_%1$s FOR VALUES IN (%1$s)', v_segment);
    PERFORM custody.grant_as('log_' || v_segment, 'custody.log');
    PERFORM custody.make_append(v_segment);
    PERFORM custody.make_reads(v_segment);
    RETURN v_segment;
END $$;

CREATE FUNCTION custody.create_topic(
    p_topic text, p_partitions int DEFAULT 1, p_max_depth bigint DEFAULT NULL, p_now timestamptz DEFAULT NULL,
    p_priorities boolean DEFAULT false, p_starvation_limit interval DEFAULT NULL
) RETURNS custody.topics
LANGUAGE plpgsql AS $$
DECLARE
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
    v_topic custody.topics;
    v_segment int;
BEGIN
    IF p_topic IS NULL OR p_topic !~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$' THEN
        PERFORM custody.refuse('invalid_argument', format('%L cannot be the name of a topic', p_topic),
            'Use 1 to 200 letters, digits, dots, dashes and underscores, starting with a letter, digit or underscore.');
    ELSIF p_partitions IS NULL OR p_partitions NOT BETWEEN 1 AND 4096 THEN
        PERFORM custody.refuse('invalid_argument',
            format('a topic cannot have %s partitions', coalesce(p_partitions::text, 'NULL')),
            'Give a number from 1 to 4096.');
    ELSIF p_max_depth <= 0 THEN
        PERFORM custody.refuse('invalid_argument', 'max_depth must be positive', 'Leave it out for no limit.');
    ELSIF p_starvation_limit <= '0' THEN
        PERFORM custody.refuse('invalid_argument', 'the starvation limit must be positive',
            'Leave it out for a minute.');
    ELSIF p_starvation_limit IS NOT NULL AND NOT coalesce(p_priorities, false) THEN
        PERFORM custody.refuse('invalid_argument', 'a starvation limit needs priorities',
            'Create the topic with priorities.');
    END IF;
    IF p_priorities THEN
        IF p_partitions > 4096 / 5 THEN
            PERFORM custody.refuse('invalid_argument',
                format('a topic with priorities cannot have %s partitions', p_partitions),
                format('Give a number from 1 to %s: each of them is five in the log.', 4096 / 5));
        END IF;
        p_partitions := 5 * p_partitions;
        p_starvation_limit := coalesce(p_starvation_limit, '1 min');
    END IF;
    INSERT INTO custody.topics (name, partitions, max_depth, created_at, starvation_limit)
    VALUES (p_topic, p_partitions, p_max_depth, v_now, p_starvation_limit)
    ON CONFLICT (name) DO NOTHING
    RETURNING * INTO v_topic;
    IF NOT FOUND THEN
        PERFORM custody.refuse('topic_exists', format('topic %L exists already', p_topic),
            'Use it, or choose another name.');
    END IF;
    v_segment := custody.open_segment(v_topic.topic_id, v_now);
    INSERT INTO custody.heads (topic_id, partition, segment_id, partitions)
    SELECT v_topic.topic_id, p, v_segment, p_partitions FROM generate_series(0, p_partitions - 1) p;
    INSERT INTO custody.segment_bounds (segment_id, partition, first_offset)
    SELECT v_segment, p, 0 FROM generate_series(0, p_partitions - 1) p;
    RETURN v_topic;
END $$;

CREATE FUNCTION custody.delete_topic(p_topic text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_topic   custody.topics := custody.lock_topic(p_topic);
    v_segment int;
BEGIN
    PERFORM custody.require_unused(v_topic);
    PERFORM custody.lock_group(g.group_id)
    FROM (SELECT group_id FROM custody.groups WHERE topic_id = v_topic.topic_id ORDER BY group_id) g;
    PERFORM 1 FROM custody.heads WHERE topic_id = v_topic.topic_id ORDER BY partition FOR UPDATE;
    FOR v_segment IN SELECT segment_id FROM custody.segments WHERE topic_id = v_topic.topic_id AND dropped_at IS NULL
        ORDER BY segment_id LOOP
        EXECUTE format('DROP TABLE custody.log_%1$s; DROP FUNCTION custody.slices_%1$s(int, bigint, bigint), '
                   'custody.slices_%1$s(int, int8multirange), custody.keys_%1$s; '
                       'DROP FUNCTION IF EXISTS custody.append_%1$s', v_segment);
    END LOOP;
    PERFORM custody.remove_group(group_id) FROM custody.groups WHERE topic_id = v_topic.topic_id;
    DELETE FROM custody.topics WHERE topic_id = v_topic.topic_id;
END $$;

-- The next offset of a partition and the time of its newest message. It is exact under the head's lock, and a lower
-- bound without it.
CREATE FUNCTION custody.tail(p_head custody.heads, OUT next_offset bigint, OUT newest timestamptz)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    EXECUTE format(
        'SELECT "offset" + 1, published_at FROM custody.log_%s WHERE partition = $1 ORDER BY "offset" DESC LIMIT 1',
                   (p_head).segment_id)
    INTO next_offset, newest USING (p_head).partition;
    IF next_offset IS NULL THEN
        next_offset := (p_head).segment_start;
        IF next_offset > (p_head).first_offset THEN
            BEGIN
                SELECT published_at INTO newest
                FROM custody.events_in(p_head, int8multirange(int8range(next_offset - 1, next_offset)));
            EXCEPTION WHEN undefined_table OR undefined_function THEN
                newest := NULL;     -- the segment was dropped: so the caller has no lock, and needs no time
            END;
        END IF;
    END IF;
END $$;

CREATE FUNCTION custody.partitions(p_topic text)
RETURNS TABLE (partition int, first_offset bigint, next_offset bigint)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
BEGIN
    RETURN QUERY
    SELECT h.partition, h.first_offset, t.next_offset
    FROM custody.heads h, LATERAL custody.tail(h) t
    WHERE h.topic_id = v_topic.topic_id
    ORDER BY h.partition;
END $$;
