-- Publishing. The head row is locked until the commit, which makes offsets dense and commit-ordered.

-- Locks the heads of the named partitions, in order, and appends to each what is due there: delayed messages, and
-- events of the outbox. p_of is the number of partitions among which the caller placed its keys, and p_priorities
-- whether it chose lanes. The caller should commit at once, because it holds the partitions until then.
CREATE FUNCTION custody.lock_to_append(
    p_topic custody.topics, p_partitions int[], p_expected bigint, p_now timestamptz, p_of int, p_priorities boolean
) RETURNS SETOF custody.heads
LANGUAGE plpgsql AS $$
DECLARE
    v_head custody.heads;
    v_now  timestamptz;
    v_seen int := 0;
BEGIN
    PERFORM custody.require_read_committed();
    IF p_expected IS NOT NULL AND cardinality(p_partitions) <> 1 THEN
        PERFORM custody.refuse('invalid_argument', 'expected_offset needs messages of one partition',
            'Publish to one partition at a time, and name it.');
    END IF;
    IF p_priorities <> (p_topic.starvation_limit IS NOT NULL) THEN
        PERFORM custody.refuse('topic_changed', format('topic %L was made anew with other lanes', p_topic.name),
            'Place the messages anew.');
    END IF;
    FOR v_head IN
        SELECT h.* FROM custody.heads h WHERE h.topic_id = p_topic.topic_id AND h.partition = ANY (p_partitions)
        ORDER BY h.partition FOR UPDATE
    LOOP
        v_seen := v_seen + 1;
        -- The locked row counts: the topic may have grown while this call waited.
        IF p_of <> v_head.partitions THEN
            PERFORM custody.refuse('topic_changed',
                format('topic %L has %s partitions now, not %s', p_topic.name, v_head.partitions, p_of),
                'Place the messages anew.');
        END IF;
        -- Nothing is delivered if the caller expects an end: it would be refused, the delivery would be rolled back,
        -- and so each time.
        IF p_expected IS NULL THEN
            IF v_head.delayed_from IS NOT NULL THEN
                v_head := custody.deliver_due(v_head, coalesce(p_now, clock_timestamp()));
            END IF;
            -- in a variable: a function call would not be an index condition
            v_now := coalesce(p_now, clock_timestamp());
            IF EXISTS (SELECT FROM custody.outbox o
                       WHERE o.topic_id = v_head.topic_id AND o.partition = v_head.partition AND o.ended_at IS NULL
                         AND o.available_at <= v_now)
            THEN
                PERFORM custody.take_outbox(v_head, v_now);
            END IF;
        END IF;
        RETURN NEXT v_head;
    END LOOP;
    IF v_seen < cardinality(p_partitions) THEN
        p_topic := custody.topic_named(p_topic.name);    -- it may have been deleted while this call waited
        IF p_of IS NULL OR p_of = p_topic.partitions THEN
            PERFORM custody.require_partition(p_topic, p) FROM unnest(p_partitions) p;
        END IF;
        PERFORM custody.refuse('topic_changed', format('topic %L was made anew meanwhile', p_topic.name),
            'Publish again.');
    END IF;
END $$;

CREATE FUNCTION custody.refuse_end(p_topic custody.topics, p_partition int, p_end bigint, p_expected bigint)
RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM custody.refuse('offset_conflict',
        format('%s/%s is at offset %s, not at %s', p_topic.name, p_partition, p_end, p_expected),
        'Read what was published meanwhile, decide again, and publish with the new offset.');
END $$;

-- Returns where each of the named partitions ends, for callers that append rows themselves, and holds them as above.
CREATE FUNCTION custody.reserve(
    p_topic text, p_partitions int[], p_counts int[], p_expected bigint DEFAULT NULL, p_now timestamptz DEFAULT NULL,
    p_of int DEFAULT NULL, p_priorities boolean DEFAULT NULL
) RETURNS TABLE (partition int, next_offset bigint, segment_id int, published_at timestamptz)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_head  custody.heads;
    v_tail  record;
BEGIN
    FOR v_head IN SELECT * FROM custody.lock_to_append(v_topic, p_partitions, p_expected, p_now, p_of, p_priorities)
    LOOP
        v_tail := custody.tail(v_head);
        IF p_expected <> v_tail.next_offset THEN
            PERFORM custody.refuse_end(v_topic, v_head.partition, v_tail.next_offset, p_expected);
        END IF;
        IF v_topic.max_depth IS NOT NULL THEN
            PERFORM custody.require_room(v_topic, v_head, v_tail.next_offset,
                                         p_counts[array_position(p_partitions, v_head.partition)]);
        END IF;
        -- Time never goes back within a partition, even if the clock does.
        RETURN QUERY SELECT v_head.partition, v_tail.next_offset, v_head.segment_id,
                            greatest(coalesce(p_now, clock_timestamp()), v_tail.newest);
    END LOOP;
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

-- Appends messages that lie together by partition: p_counts of them for each of p_partitions, which are in order. All
-- other arrays are as long as the payloads, or empty if the messages have none of it. The payloads are an array, or
-- joined, with the place where each ends. Returns the first offset in each partition. Clients call this: it checks
-- neither the form of messages nor that keys are in their own partitions.
CREATE FUNCTION custody.append(
    p_topic text, p_partitions int[], p_counts int[], p_keys text[], p_kinds "char"[], p_payloads bytea[],
    p_headers text[], p_expected bigint DEFAULT NULL, p_of int DEFAULT NULL, p_priorities boolean DEFAULT NULL,
    p_now timestamptz DEFAULT NULL, p_joined bytea DEFAULT NULL, p_ends int[] DEFAULT NULL
) RETURNS bigint[]
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_head  custody.heads;
    v_first bigint;
    v_all   bigint[] := '{}';
    v_n     int := 1;
    v_from  int := 1;
    v_until int;
    v_start int;
BEGIN
    FOR v_head IN SELECT * FROM custody.lock_to_append(v_topic, p_partitions, p_expected, p_now, p_of, p_priorities)
    LOOP
        IF v_topic.max_depth IS NOT NULL THEN
            PERFORM custody.require_room(v_topic, v_head, (custody.tail(v_head)).next_offset, p_counts[v_n]);
        END IF;
        IF cardinality(p_partitions) = 1 THEN
            EXECUTE format('SELECT custody.append_%s($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)', v_head.segment_id)
            INTO v_first
            USING v_head.topic_id, v_head.partition, p_keys, p_kinds, p_payloads, p_headers, p_expected, p_now,
                  p_joined, p_ends;
        ELSE
            v_until := v_from + p_counts[v_n] - 1;
            v_start := CASE WHEN v_from > 1 THEN p_ends[v_from - 1] ELSE 0 END;
            EXECUTE format('SELECT custody.append_%s($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)', v_head.segment_id)
            INTO v_first
            USING v_head.topic_id, v_head.partition, p_keys[v_from:v_until],
                  CASE WHEN cardinality(p_kinds) = 1 THEN p_kinds ELSE p_kinds[v_from:v_until] END,
                  p_payloads[v_from:v_until], p_headers[v_from:v_until], p_expected, p_now,
                  substring(p_joined FROM v_start + 1 FOR p_ends[v_until] - v_start),
                  CASE WHEN p_ends IS NOT NULL
                       THEN ARRAY(SELECT e - v_start FROM unnest(p_ends[v_from:v_until]) e) END;
            v_from := v_until + 1;
            IF p_counts[v_n] < 1 OR v_n = cardinality(p_partitions)
                AND v_until IS DISTINCT FROM coalesce(cardinality(p_ends), cardinality(p_payloads))
            THEN
                PERFORM custody.refuse('invalid_argument', 'the counts do not add up to the messages',
                    'Say how many messages each partition gets.');
            END IF;
        END IF;
        IF p_expected <> v_first THEN
            PERFORM custody.refuse_end(v_topic, v_head.partition, v_first, p_expected);
        END IF;
        v_all := v_all || v_first;
        v_n := v_n + 1;
    END LOOP;
    RETURN v_all;
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
    v_sorted  record;
    v_firsts  bigint[];
    v_offsets bigint[];
BEGIN
    PERFORM custody.require_read_committed();
    IF cardinality(p_partitions) <> cardinality(p_payloads) THEN
        PERFORM custody.refuse('invalid_argument', 'each payload needs a partition', 'Give arrays of one length.');
    ELSIF cardinality(p_kinds) <> cardinality(p_payloads) OR nullif(cardinality(p_keys), 0) <> cardinality(p_payloads)
        OR nullif(cardinality(p_headers), 0) <> cardinality(p_payloads)
    THEN
        PERFORM custody.refuse('invalid_argument', 'there are not as many keys, kinds or headers as payloads',
            'Give arrays of one length.');
    END IF;
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
    SELECT array_agg(c.partition ORDER BY c.partition) AS partitions,
           array_agg(c.messages ORDER BY c.partition) AS counts
    INTO v_sorted
    FROM (SELECT w AS partition, count(*)::int AS messages FROM unnest(v_where) w GROUP BY w) c;
    IF v_known = 0 AND cardinality(v_sorted.partitions) = 1 THEN
        v_firsts := custody.append(p_topic, v_sorted.partitions, v_sorted.counts, p_keys, p_kinds::"char"[], p_payloads,
                                   p_headers, p_expected, p_of, p_priorities, p_now);
    ELSE
        SELECT custody.append(p_topic, v_sorted.partitions, v_sorted.counts, array_agg(m.key ORDER BY m.partition, m.n),
                              array_agg(m.kind::"char" ORDER BY m.partition, m.n),
                              array_agg(m.payload ORDER BY m.partition, m.n),
                              array_agg(m.headers ORDER BY m.partition, m.n), p_expected, p_of, p_priorities, p_now)
        INTO v_firsts
        FROM unnest(p_partitions, p_keys, p_kinds, p_payloads, p_headers)
             WITH ORDINALITY m (partition, key, kind, payload, headers, n)
        WHERE m.n > v_known;
    END IF;
    SELECT array_agg(m.first - 1 + m.n ORDER BY m.place) INTO v_offsets
    FROM (SELECT f.first, w.place, row_number() OVER (PARTITION BY w.partition ORDER BY w.place) AS n
          FROM unnest(v_where) WITH ORDINALITY w (partition, place)
          JOIN unnest(v_sorted.partitions, v_firsts) f (partition, first) USING (partition)) m;
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
    PERFORM custody.require_read_committed();
    PERFORM custody.require_message('j', convert_to(p_payload::text, 'UTF8'), p_headers);
    RETURN QUERY
    SELECT r.partition, r."offset"
    FROM custody.publish(p_topic, ARRAY[v_partition], ARRAY[p_key], ARRAY['j'],
                         ARRAY[convert_to(p_payload::text, 'UTF8')], ARRAY[p_headers::text],
                         p_of => v_topic.partitions) r;
END $$;
