-- Publishing. The head row is locked until the commit, which makes offsets dense and commit-ordered.

-- Locks the heads of the named partitions, in order, and returns where each ends: there COPY or INSERT goes on. p_of is
-- the number of partitions among which the caller placed its keys, and p_priorities whether it chose lanes. The caller
-- should commit at once, because it holds the partitions until then.
CREATE FUNCTION custody.reserve(
    p_topic text, p_partitions int[], p_counts int[], p_expected bigint DEFAULT NULL, p_now timestamptz DEFAULT NULL,
    p_of int DEFAULT NULL, p_priorities boolean DEFAULT NULL
) RETURNS TABLE (partition int, next_offset bigint, segment_id int, published_at timestamptz)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_head  custody.heads;
    v_tail  record;
    v_now   timestamptz;
    v_seen  int := 0;
BEGIN
    PERFORM custody.require_read_committed();
    IF p_expected IS NOT NULL AND cardinality(p_partitions) <> 1 THEN
        PERFORM custody.refuse('invalid_argument', 'expected_offset needs messages of one partition',
            'Publish to one partition at a time, and name it.');
    END IF;
    IF p_priorities <> (v_topic.starvation_limit IS NOT NULL) THEN
        PERFORM custody.refuse('topic_changed', format('topic %L was made anew with other lanes', p_topic),
            'Place the messages anew.');
    END IF;
    FOR v_head IN
        SELECT h.* FROM custody.heads h WHERE h.topic_id = v_topic.topic_id AND h.partition = ANY (p_partitions)
        ORDER BY h.partition FOR UPDATE
    LOOP
        v_seen := v_seen + 1;
        -- The locked row counts: the topic may have grown while this call waited.
        IF p_of <> v_head.partitions THEN
            PERFORM custody.refuse('topic_changed',
                format('topic %L has %s partitions now, not %s', p_topic, v_head.partitions, p_of),
                'Place the messages anew.');
        END IF;
        -- Nothing is delivered if the caller expects an end: it would be refused, the delivery would be rolled back,
        -- and so each time.
        IF v_head.delayed_from IS NOT NULL AND p_expected IS NULL THEN
            v_head := custody.deliver_due(v_head, coalesce(p_now, clock_timestamp()));
        END IF;
        -- in a variable: a function call would not be an index condition
        v_now := coalesce(p_now, clock_timestamp());
        IF p_expected IS NULL AND EXISTS (
            SELECT FROM custody.outbox o
            WHERE o.topic_id = v_head.topic_id AND o.partition = v_head.partition AND o.ended_at IS NULL
              AND o.available_at <= v_now)
        THEN
            PERFORM custody.take_outbox(v_head, v_now);
        END IF;
        v_tail := custody.tail(v_head);
        IF p_expected <> v_tail.next_offset THEN
            PERFORM custody.refuse('offset_conflict',
                format('%s/%s is at offset %s, not at %s', p_topic, v_head.partition, v_tail.next_offset, p_expected),
                'Read what was published meanwhile, decide again, and publish with the new offset.');
        END IF;
        IF v_topic.max_depth IS NOT NULL THEN
            PERFORM custody.require_room(v_topic, v_head, v_tail.next_offset,
                                         p_counts[array_position(p_partitions, v_head.partition)]);
        END IF;
        -- Time never goes back within a partition, even if the clock does.
        v_now := greatest(coalesce(p_now, clock_timestamp()), v_tail.newest);
        RETURN QUERY SELECT v_head.partition, v_tail.next_offset, v_head.segment_id, v_now;
    END LOOP;
    IF v_seen < cardinality(p_partitions) THEN
        v_topic := custody.topic_named(p_topic);    -- the topic may have been deleted while this call waited
        IF p_of IS NULL OR p_of = v_topic.partitions THEN
            PERFORM custody.require_partition(v_topic, p) FROM unnest(p_partitions) p;
        END IF;
        PERFORM custody.refuse('topic_changed', format('topic %L was made anew meanwhile', p_topic), 'Publish again.');
    END IF;
END $$;

-- Refuses a key beside a partition that is not its own, because a key in two partitions has no order. Returns the
-- number of partitions for which that was checked.
CREATE FUNCTION custody.require_whole_keys(p_topic text, p_partitions int[], p_keys text[]) RETURNS int
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_split record;
BEGIN
    SELECT m.key, m.partition, x.own INTO v_split
    FROM unnest(p_keys, p_partitions) m (key, partition)
    CROSS JOIN LATERAL (SELECT CASE WHEN v_topic.starvation_limit IS NULL
                                    THEN custody.partition_for(m.key, v_topic.partitions)
                                    ELSE custody.partition_for(m.key, v_topic.partitions / 5) * 5
                                        + m.partition % 5 END AS own) x
    WHERE m.partition >= 0 AND m.partition < v_topic.partitions AND x.own <> m.partition LIMIT 1;
    IF FOUND THEN
        PERFORM custody.refuse('key_split',
            format('the key %L belongs to partition %s, and the message names partition %s: '
                   'a key in two partitions has no order',
                   v_split.key, v_split.own, v_split.partition),
            'Name the partition that custody.partition_for gives, or say p_allow_split if the key needs no order.');
    END IF;
    RETURN v_topic.partitions;
END $$;

-- Appends a batch and returns where each message went, in the order given. All arrays are as long as the payloads. With
-- p_of the caller has placed the keys itself, among so many partitions. Without it a key has to be in its own
-- partition, unless p_allow_split.
CREATE FUNCTION custody.publish(
    p_topic text, p_partitions int[], p_keys text[], p_kinds text[], p_payloads bytea[], p_headers text[],
    p_producer text DEFAULT NULL, p_epoch int DEFAULT NULL, p_sequence bigint DEFAULT NULL,
    p_expected bigint DEFAULT NULL, p_now timestamptz DEFAULT NULL, p_of int DEFAULT NULL,
    p_priorities boolean DEFAULT NULL, p_allow_split boolean DEFAULT false
) RETURNS TABLE (partition int, "offset" bigint, duplicate boolean)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_known   int := 0;
    v_where   int[] := p_partitions;
    v_bases   record;
    v_offsets bigint[];
BEGIN
    IF p_producer IS NOT NULL THEN
        RETURN QUERY SELECT r.partition, r."offset", r.duplicate
                     FROM custody.known_receipts(p_topic, p_producer, p_epoch, p_sequence, cardinality(p_payloads)) r;
        GET DIAGNOSTICS v_known = ROW_COUNT;
        IF v_known = cardinality(p_payloads) THEN
            RETURN;
        END IF;
        v_where := p_partitions[v_known + 1:];
    END IF;
    IF p_of IS NULL THEN
        PERFORM custody.require_message(m.kind, m.payload, m.headers::jsonb)
        FROM unnest(p_kinds, p_payloads, p_headers) m (kind, payload, headers);
    END IF;
    IF p_of IS NULL AND NOT p_allow_split THEN
        p_of := custody.require_whole_keys(p_topic, v_where, p_keys[v_known + 1:]);
    END IF;
    SELECT array_agg(r.partition) AS partitions, array_agg(r.next_offset) AS bases, min(r.segment_id) AS segment_id,
           array_agg(r.published_at) AS times
    INTO v_bases
    FROM (SELECT array_agg(p) AS partitions, array_agg(n) AS counts
          FROM (SELECT p, count(*)::int AS n FROM unnest(v_where) p GROUP BY p) c) w,
         custody.reserve(p_topic, w.partitions, w.counts, p_expected, p_now, p_of, p_priorities) r;
    EXECUTE format(
        'WITH added AS (
             INSERT INTO custody.log_%1$s (segment_id, partition, "offset", published_at, key, kind, payload, headers)
             SELECT %1$s, m.partition, b.base + row_number() OVER (PARTITION BY m.partition ORDER BY m.n) - 1, b.time,
                    m.key, m.kind::"char", m.payload, m.headers::jsonb
             FROM unnest($1, $2, $3, $4, $5) WITH ORDINALITY m (partition, key, kind, payload, headers, n)
             JOIN unnest($6, $7, $8) b (partition, base, time) USING (partition)
             WHERE m.n > $9)
         SELECT array_agg(o ORDER BY n)
         FROM (SELECT m.n, b.base + row_number() OVER (PARTITION BY m.partition ORDER BY m.n) - 1 AS o
               FROM unnest($1) WITH ORDINALITY m (partition, n)
               JOIN unnest($6, $7) b (partition, base) USING (partition)
               WHERE m.n > $9) x', v_bases.segment_id)
    INTO v_offsets
    USING p_partitions, p_keys, p_kinds, p_payloads, p_headers, v_bases.partitions, v_bases.bases, v_bases.times,
          v_known;
    IF p_producer IS NOT NULL THEN
        PERFORM custody.remember_receipts(p_topic, p_producer, p_epoch, p_sequence + v_known, v_where, v_offsets,
                                          p_now);
    END IF;
    RETURN QUERY SELECT x.p, x.o, false FROM unnest(v_where, v_offsets) x (p, o);
END $$;

-- For psql: one JSON message.
CREATE FUNCTION custody.send(
    p_topic text, p_payload jsonb, p_key text DEFAULT NULL, p_headers jsonb DEFAULT NULL, p_priority text DEFAULT NULL)
RETURNS TABLE (partition int, "offset" bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_partition int := custody.place(v_topic, p_key, p_priority);
BEGIN
    PERFORM custody.require_message('j', convert_to(p_payload::text, 'UTF8'), p_headers);
    RETURN QUERY
    SELECT r.partition, r."offset"
    FROM custody.publish(p_topic, ARRAY[v_partition], ARRAY[p_key], ARRAY['j'],
                         ARRAY[convert_to(p_payload::text, 'UTF8')], ARRAY[p_headers::text],
                         p_of => v_topic.partitions) r;
END $$;
