-- The outbox as a way into the log: from the caller's own transaction, and from other databases.

-- A plain name is a topic of this database. The relay serves names with a colon, and the empty one. The partition is
-- chosen here.
CREATE FUNCTION custody.outbox_route(p_destination text, p_key text, OUT topic_id int, OUT partition int)
LANGUAGE plpgsql AS $$
DECLARE
    v_topic custody.topics;
BEGIN
    IF coalesce(p_destination, '') <> '' AND position(':' IN p_destination) = 0 THEN
        v_topic := custody.topic_named(p_destination);
        topic_id := v_topic.topic_id;
        partition := custody.place(v_topic, p_key);
    END IF;
END $$;

-- Whether the topic exists, if the destination is one.
CREATE FUNCTION custody.outbox_routed(p_destination text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT p_destination = '' OR position(':' IN p_destination) > 0
        OR EXISTS (SELECT FROM custody.topics t WHERE t.name = p_destination)
$$;

-- The first due events of a partition from p_from on that have nothing of their key before them, while other keys wait.
-- Keys in p_waiting are not looked at, and keys that turn out to wait are added. At most p_window open events are
-- scanned, a thousand at a time, so that a publish does not pay for all that waits; `scanned` is the last of them, null
-- at the end. Nothing is locked.
CREATE FUNCTION custody.outbox_look(
    p_head custody.heads, p_now timestamptz, p_from bigint, p_window int, INOUT p_waiting text[], OUT ids bigint[],
    OUT scanned bigint
)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    c_step  constant int := 1000;
    v_found record;
BEGIN
    ids := '{}';
    scanned := p_from;
    FOR _ IN 1 .. ceil(p_window::numeric / c_step) LOOP
        SELECT coalesce(array_agg(w.id) FILTER (WHERE w.due), '{}') AS due,
               array_agg(w.ordering_key) FILTER (WHERE w.due) AS keys,
               CASE WHEN count(*) = c_step THEN max(w.id) END AS last
        INTO v_found
        FROM (SELECT o.id, o.ordering_key, o.status = 'PENDING' AND o.available_at <= p_now
                     AND (o.ordering_key IS NULL OR o.ordering_key NOT IN (SELECT k FROM unnest(p_waiting) k)) AS due
              FROM custody.outbox o
              WHERE (o.topic_id, o.partition, o.id) > ((p_head).topic_id, (p_head).partition, scanned)
                AND (o.topic_id, o.partition) <= ((p_head).topic_id, (p_head).partition)
                AND o.topic_id IS NOT NULL AND o.ended_at IS NULL
              ORDER BY o.topic_id, o.partition, o.id LIMIT c_step) w;
        scanned := v_found.last;
        IF cardinality(v_found.due) > 0 THEN
            ids := custody.outbox_in_order(v_found.due);
            EXIT WHEN cardinality(ids) > 0;
            p_waiting := p_waiting || ARRAY(SELECT DISTINCT k FROM unnest(v_found.keys) k);
        END IF;
        EXIT WHEN scanned IS NULL;
    END LOOP;
END $$;

-- The same; if there is nothing within the window, once more from a random place behind it. No position is kept between
-- two calls, and in the end each event has its turn.
CREATE FUNCTION custody.outbox_beside(p_head custody.heads, p_now timestamptz, p_window int, p_waiting text[])
RETURNS bigint[]
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_look record;
    v_last bigint;
    v_ahead double precision;
BEGIN
    SELECT * INTO v_look FROM custody.outbox_look(p_head, p_now, 0, p_window, p_waiting);
    IF cardinality(v_look.ids) = 0 AND v_look.scanned IS NOT NULL THEN
        SELECT o.id INTO v_last FROM custody.outbox o
        WHERE (o.topic_id, o.partition) <= ((p_head).topic_id, (p_head).partition) AND o.topic_id IS NOT NULL
          AND o.ended_at IS NULL
        ORDER BY o.topic_id DESC, o.partition DESC, o.id DESC LIMIT 1;
        -- Every other time near the window: ids have gaps, and most open events may be close behind it.
        v_ahead := greatest(v_last - v_look.scanned, 0);
        v_ahead := CASE WHEN random() < 0.5 THEN random() * v_ahead ELSE power(v_ahead + 1, random()) - 1 END;
        SELECT * INTO v_look
        FROM custody.outbox_look(p_head, p_now, v_look.scanned + floor(v_ahead)::bigint, p_window, v_look.p_waiting);
    END IF;
    RETURN v_look.ids;
END $$;

-- Whether an event still belongs to its partition: the topic may have grown since it was written.
CREATE FUNCTION custody.outbox_belongs(p_event custody.outbox, p_partitions int) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(custody.partition_for(coalesce(p_event.ordering_key, p_event.partition_key), p_partitions),
                    p_event.partition) = p_event.partition
$$;

-- Moves committed and due events of a partition into the log, in order. It is one transaction, so it happens exactly
-- once. If somebody else holds the head of the partition, it does nothing: they move the events, or the next caller
-- does. Events for which max_depth leaves no room stay.
CREATE FUNCTION custody.take_outbox(
    p_head custody.heads, p_now timestamptz, p_max int DEFAULT 1000, p_window int DEFAULT 5000
) RETURNS int
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET plan_cache_mode = auto AS $$
DECLARE
    v_head  custody.heads;
    v_tail  record;
    v_fixed boolean;      -- no event can belong to another partition
    v_careful boolean;
    v_waiting text[];
    v_found record;
    v_ids   bigint[];
    v_at    timestamptz;
    v_batch record;
BEGIN
    SELECT * INTO v_head FROM custody.heads h WHERE h.topic_id = (p_head).topic_id AND h.partition = (p_head).partition
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF p_now NOT BETWEEN now() AND clock_timestamp() THEN
        PERFORM set_config('custody.given_time', 'on', true);
    END IF;
    v_tail := custody.tail(v_head);
    p_max := least(p_max, custody.room_left(v_head, v_tail.next_offset));
    SELECT t.starvation_limit IS NOT NULL OR v_head.partitions = 1 INTO v_fixed FROM custody.topics t
    WHERE t.topic_id = v_head.topic_id;
    -- First as if no key had to wait, which is much cheaper. If one has to, once more, because its events would hold up
    -- all others.
    FOREACH v_careful IN ARRAY ARRAY[false, true] LOOP
        IF v_careful THEN
            -- Materialized: otherwise a plan reads the whole index of the keys, because it has them sorted.
            WITH keys AS MATERIALIZED (
                SELECT o.ordering_key FROM custody.outbox o
                WHERE o.id = ANY (ARRAY(SELECT unnest(v_found.here) EXCEPT SELECT unnest(v_ids))))
            SELECT array_agg(DISTINCT k.ordering_key) INTO v_waiting FROM keys k;
            v_ids := v_ids || custody.outbox_beside(v_head, p_now, p_window, v_waiting);
            SELECT coalesce(array_agg(w.id) FILTER (WHERE w.belongs AND NOT w.long), '{}') AS here,
                   array_agg(w.id) FILTER (WHERE NOT w.belongs) AS elsewhere,
                   array_agg(w.id) FILTER (WHERE w.belongs AND w.long) AS long
            INTO v_found
            FROM (SELECT o.id, CASE WHEN v_fixed THEN true
                                    ELSE custody.outbox_belongs(o, v_head.partitions) END AS belongs,
                         coalesce(octet_length(coalesce(o.ordering_key, o.partition_key)) > 2000, false) AS long
                  FROM custody.outbox o WHERE o.id = ANY (v_ids) AND o.status = 'PENDING'
                  ORDER BY o.id LIMIT p_max FOR UPDATE OF o SKIP LOCKED) w;
        ELSE
            SELECT coalesce(array_agg(w.id) FILTER (WHERE w.belongs AND NOT w.long), '{}') AS here,
                   array_agg(w.id) FILTER (WHERE NOT w.belongs) AS elsewhere,
                   array_agg(w.id) FILTER (WHERE w.belongs AND w.long) AS long
            INTO v_found
            FROM (SELECT o.id, CASE WHEN v_fixed THEN true
                                    ELSE custody.outbox_belongs(o, v_head.partitions) END AS belongs,
                         coalesce(octet_length(coalesce(o.ordering_key, o.partition_key)) > 2000, false) AS long
                  FROM custody.outbox o
                  -- Compared as rows, and in their order: only the index of open events can give that. With `=` and the
                  -- id alone the primary key could, too, and a plan that was made with an empty outbox would read all
                  -- published events.
                  WHERE (o.topic_id, o.partition, o.id) > (v_head.topic_id, v_head.partition, 0)
                    AND (o.topic_id, o.partition) <= (v_head.topic_id, v_head.partition)
                    AND o.topic_id IS NOT NULL AND o.ended_at IS NULL AND o.status = 'PENDING'
                    AND o.available_at <= p_now
                  ORDER BY o.topic_id, o.partition, o.id LIMIT p_max FOR UPDATE OF o SKIP LOCKED) w;
        END IF;
        IF v_found.elsewhere IS NOT NULL THEN
            -- Whoever comes to their new partition takes them.
            UPDATE custody.outbox
            SET partition = custody.partition_for(coalesce(ordering_key, partition_key), v_head.partitions)
            WHERE id = ANY (v_found.elsewhere);
        END IF;
        IF v_found.long IS NOT NULL THEN
            -- The log does not take keys that are too long. These events would hold up all others.
            PERFORM custody.outbox_bury(v_found.long, 'custody', 'a key has at most 2,000 bytes', p_now);
        END IF;
        v_ids := custody.outbox_in_order(v_found.here);
        EXIT WHEN cardinality(v_ids) = cardinality(v_found.here);
    END LOOP;
    IF cardinality(v_ids) = 0 THEN
        RETURN 0;
    END IF;
    v_at := greatest(p_now, v_tail.newest);
    UPDATE custody.outbox
    SET status = 'CLAIMED', claimed_at = p_now, claimed_by = 'custody', expires_at = v_at + interval '1 min',
        updated_at = p_now
    WHERE id = ANY (v_ids);
    WITH moved AS (
        UPDATE custody.outbox SET status = 'PUBLISHED', published_at = v_at, claimed_at = NULL, claimed_by = NULL,
            expires_at = NULL
        WHERE id = ANY (v_ids)
        RETURNING id, event_id, event_type, kind, payload, headers, coalesce(ordering_key, partition_key) AS key
    )
    SELECT array_agg(m.key ORDER BY m.id) AS keys, array_agg(m.kind ORDER BY m.id) AS kinds,
           array_agg(m.payload ORDER BY m.id) AS payloads,
           array_agg((coalesce(m.headers, '{}')
                      || jsonb_build_object('x-custody-event-id', m.event_id,
                                            'x-custody-event-type', m.event_type))::text
                     ORDER BY m.id) AS headers
    INTO v_batch FROM moved m;
    PERFORM custody.put_at_head(v_head, v_batch.keys, v_batch.kinds, v_batch.payloads, v_batch.headers, v_at);
    RETURN cardinality(v_batch.payloads);
END $$;

-- How many more messages a partition may have; null: any number.
CREATE FUNCTION custody.room_left(p_head custody.heads, p_next bigint) RETURNS int
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN t.max_depth IS NOT NULL THEN greatest(0, t.max_depth - coalesce(
        (SELECT max(p_next - f.frontier + custody.cardinality(custody.unresolved(f, true)))
         FROM custody.groups g CROSS JOIN LATERAL custody.position(g.group_id, (p_head).partition) f
         WHERE g.topic_id = t.topic_id),
        p_next - (p_head).first_offset))::int END
    FROM custody.topics t WHERE t.topic_id = (p_head).topic_id
$$;

-- The partitions for which events are pending, with the name of the topic, or null if it is gone.
CREATE FUNCTION custody.outbox_partitions() RETURNS TABLE (topic text, topic_id int, partition int)
LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    WITH RECURSIVE waiting AS (
        (SELECT o.topic_id, o.partition FROM custody.outbox o WHERE o.ended_at IS NULL AND o.topic_id IS NOT NULL
         ORDER BY o.topic_id, o.partition LIMIT 1)
        UNION ALL
        SELECT n.* FROM waiting w CROSS JOIN LATERAL (
            SELECT o.topic_id, o.partition FROM custody.outbox o
            WHERE o.ended_at IS NULL AND o.topic_id IS NOT NULL
              AND (o.topic_id, o.partition) > (w.topic_id, w.partition)
            ORDER BY o.topic_id, o.partition LIMIT 1) n
    )
    SELECT t.name, w.topic_id, w.partition FROM waiting w LEFT JOIN custody.topics t USING (topic_id) ORDER BY 2, 3
$$;

-- Moves pending events of one partition. If the topic is gone, it ends them.
CREATE FUNCTION custody.move_outbox(
    p_topic_id int, p_partition int, p_max int DEFAULT 1000, p_now timestamptz DEFAULT NULL
) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    v_now  timestamptz := coalesce(p_now, clock_timestamp());
    v_head custody.heads;
BEGIN
    PERFORM custody.require_read_committed();
    IF p_now IS NOT NULL THEN
        PERFORM set_config('custody.given_time', 'on', true);
    END IF;
    SELECT * INTO v_head FROM custody.heads h WHERE h.topic_id = p_topic_id AND h.partition = p_partition;
    IF FOUND THEN
        RETURN custody.take_outbox(v_head, v_now, p_max);
    END IF;
    PERFORM custody.outbox_bury(
        ARRAY(SELECT o.id FROM custody.outbox o
              WHERE o.topic_id = p_topic_id AND o.partition = p_partition AND o.ended_at IS NULL
                AND o.status = 'PENDING'
              LIMIT p_max FOR UPDATE SKIP LOCKED),
        'custody', 'its topic was deleted', v_now);
    RETURN 0;
END $$;

-- Publishes events of the outbox of another database, each once in this topic and from this source: events that have
-- come before are left out. Returns how many were new.
CREATE FUNCTION custody.outbox_receive(
    p_topic text, p_events uuid[], p_replays int[], p_keys text[], p_kinds text[], p_payloads bytea[], p_headers text[],
    p_now timestamptz DEFAULT NULL, p_source text DEFAULT ''
) RETURNS int
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_new     uuid[];
    v_replays int[];
    v_of      int[];
BEGIN
    PERFORM custody.require_read_committed();
    -- Sorted, so that two who bring the same events do not deadlock.
    WITH added AS (
        INSERT INTO custody.outbox_received (topic_id, source, event_id, replay, received_at)
        SELECT v_topic.topic_id, p_source, e.event_id, e.replay, coalesce(p_now, clock_timestamp())
        FROM unnest(p_events, p_replays) e (event_id, replay) ORDER BY 3, 4
        ON CONFLICT DO NOTHING
        RETURNING event_id, replay
    )
    SELECT array_agg(a.event_id), array_agg(a.replay) INTO v_new, v_replays FROM added a;
    IF v_new IS NULL THEN
        RETURN 0;
    ELSIF cardinality(v_new) < cardinality(p_events) THEN
        SELECT array_agg(e.key ORDER BY e.n), array_agg(e.kind ORDER BY e.n), array_agg(e.payload ORDER BY e.n),
               array_agg(e.headers ORDER BY e.n)
        INTO p_keys, p_kinds, p_payloads, p_headers
        -- The first of those that are named more than once.
        FROM (SELECT DISTINCT ON (b.event_id, b.replay) b.*
              FROM unnest(p_events, p_replays, p_keys, p_kinds, p_payloads, p_headers) WITH ORDINALITY
                   b (event_id, replay, key, kind, payload, headers, n)
              JOIN unnest(v_new, v_replays) a (event_id, replay) USING (event_id, replay)
              ORDER BY b.event_id, b.replay, b.n) e;
    END IF;
    IF v_topic.partitions = 1 THEN
        v_of := array_fill(0, ARRAY[cardinality(p_kinds)]);
    ELSE
        v_of := ARRAY(SELECT custody.place(v_topic, k.key) FROM unnest(p_keys) WITH ORDINALITY k (key, n) ORDER BY k.n);
    END IF;
    PERFORM custody.publish(p_topic, v_of, p_keys, p_kinds, p_payloads, p_headers, p_now => p_now,
                            p_of => v_topic.partitions);
    RETURN cardinality(v_new);
END $$;
