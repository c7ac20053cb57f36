-- Delayed messages wait in a table of their own. The first claim or publish after their time appends them to the log.
-- Whoever stores one holds the head of the partition, as whoever appends does. So no message that is committed late is
-- due before `delayed_from`.

CREATE FUNCTION custody.publish_delayed(
    p_topic text, p_partitions int[], p_keys text[], p_kinds text[], p_payloads bytea[], p_headers text[],
    p_deliver_at timestamptz[], p_delays double precision[],
    p_producer text DEFAULT NULL, p_epoch int DEFAULT NULL, p_sequence bigint DEFAULT NULL,
    p_now timestamptz DEFAULT NULL, p_of int DEFAULT NULL, p_allow_split boolean DEFAULT false
) RETURNS TABLE (partition int, delay_id bigint, deliver_at timestamptz, duplicate boolean)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_known int := 0;
    v_ids   bigint[];
BEGIN
    PERFORM custody.require_read_committed();
    -- The clock of the database counts: it decides when they are due.
    SELECT array_agg(coalesce(m.t, coalesce(p_now, clock_timestamp()) + make_interval(secs => m.d)) ORDER BY m.n)
    INTO p_deliver_at
    FROM unnest(p_deliver_at, p_delays) WITH ORDINALITY m (t, d, n);
    IF EXISTS (SELECT FROM unnest(p_deliver_at) t WHERE t IS NULL OR t < '0001-01-01Z' OR t >= '10000-01-01Z')
        OR cardinality(p_deliver_at) <> cardinality(p_payloads) THEN
        PERFORM custody.refuse('invalid_argument', 'each delayed message needs the time when it is due',
            'Give one in the years 1 to 9999.');
    END IF;
    IF p_producer IS NOT NULL THEN
        RETURN QUERY SELECT r.partition, r."offset", r.deliver_at, r.duplicate
                     FROM custody.known_receipts(p_topic, p_producer, p_epoch, p_sequence, cardinality(p_payloads),
                                                 true) r;
        GET DIAGNOSTICS v_known = ROW_COUNT;
        IF v_known = cardinality(p_payloads) THEN
            RETURN;
        END IF;
    END IF;
    PERFORM custody.require_partition(v_topic, p) FROM unnest(p_partitions) p;
    IF p_of IS NULL THEN
        PERFORM custody.require_message(m.kind, m.payload, m.headers::jsonb)
        FROM unnest(p_kinds, p_payloads, p_headers) m (kind, payload, headers);
    END IF;
    IF p_of IS NULL AND NOT p_allow_split THEN
        p_of := custody.require_whole_keys(p_topic, p_partitions[v_known + 1:], p_keys[v_known + 1:]);
    END IF;
    -- A new message may be due before all that wait. One that is past due is due now.
    PERFORM custody.lock_heads(v_topic, p_partitions[v_known + 1:], p_of);
    UPDATE custody.heads h SET delayed_from = least(h.delayed_from, w.earliest)
    FROM (SELECT m.p, min(m.t) AS earliest FROM unnest(p_partitions, p_deliver_at) WITH ORDINALITY m (p, t, n)
          WHERE m.n > v_known GROUP BY m.p) w
    WHERE h.topic_id = v_topic.topic_id AND h.partition = w.p
      AND (h.delayed_from IS NULL OR h.delayed_from > w.earliest);
    WITH added AS (
        INSERT INTO custody.delayed (topic_id, partition, deliver_at, key, kind, payload, headers, delayed_at)
        SELECT v_topic.topic_id, m.partition, m.deliver_at, m.key, m.kind::"char", m.payload, m.headers::jsonb,
               coalesce(p_now, clock_timestamp())
        FROM unnest(p_partitions, p_deliver_at, p_keys, p_kinds, p_payloads, p_headers)
             WITH ORDINALITY m (partition, deliver_at, key, kind, payload, headers, n)
        WHERE m.n > v_known ORDER BY m.n
        RETURNING delayed.delay_id)
    SELECT array_agg(a.delay_id ORDER BY a.delay_id) INTO v_ids FROM added a;
    IF p_producer IS NOT NULL THEN
        PERFORM custody.remember_receipts(p_topic, p_producer, p_epoch, p_sequence + v_known,
                                          p_partitions[v_known + 1:], v_ids, p_now, p_deliver_at[v_known + 1:]);
    END IF;
    RETURN QUERY SELECT m.p, m.i, m.t, false
        FROM unnest(p_partitions[v_known + 1:], v_ids, p_deliver_at[v_known + 1:]) m (p, i, t);
END $$;

-- Locks the heads of these partitions, in order. p_of is the number of partitions among which the caller placed its
-- keys.
CREATE FUNCTION custody.lock_heads(p_topic custody.topics, p_partitions int[], p_of int DEFAULT NULL)
RETURNS SETOF custody.heads
LANGUAGE plpgsql AS $$
DECLARE
    v_topic custody.topics;
BEGIN
    RETURN QUERY
    SELECT h.* FROM custody.heads h WHERE h.topic_id = (p_topic).topic_id AND h.partition = ANY (p_partitions)
    ORDER BY h.partition FOR UPDATE;
    -- The number of partitions changes only under all heads, so it is read here.
    SELECT * INTO v_topic FROM custody.topics t WHERE t.topic_id = (p_topic).topic_id;
    IF NOT FOUND OR p_of <> v_topic.partitions THEN
        PERFORM custody.refuse('topic_changed', format('topic %L has changed meanwhile', (p_topic).name),
            'Place the messages anew.');
    END IF;
END $$;

-- Appends due messages to the log, up to p_most, in the order of their times. If none is due, it takes no lock. Returns
-- the head as it is afterwards. The caller may hold cursors and nothing else: heads are locked after them.
CREATE FUNCTION custody.deliver_due(p_head custody.heads, p_now timestamptz, p_most int DEFAULT 1000)
RETURNS custody.heads
LANGUAGE plpgsql SET plan_cache_mode = auto AS $$
DECLARE
    v_head  custody.heads;
    v_due   record;
    v_until timestamptz;
BEGIN
    IF (SELECT min(d.deliver_at) FROM custody.delayed d
        WHERE d.topic_id = (p_head).topic_id AND d.partition = (p_head).partition
          AND d.deliver_at >= (p_head).delayed_from) <= p_now
    THEN
        -- If somebody else has the head, they or the next claim deliver. Waiting here would stall the claims of the
        -- partition.
        SELECT h.* INTO v_head FROM custody.heads h
        WHERE h.topic_id = (p_head).topic_id AND h.partition = (p_head).partition FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN p_head;
        END IF;
        p_head := v_head;
        WITH due AS MATERIALIZED (
            SELECT d.delay_id, d.deliver_at FROM custody.delayed d
            WHERE d.topic_id = (p_head).topic_id AND d.partition = (p_head).partition
              AND d.deliver_at >= (p_head).delayed_from AND d.deliver_at <= p_now
            ORDER BY d.deliver_at, d.delay_id LIMIT p_most
        ), taken AS (
            -- This waits for a message that is being cancelled: it is delivered, or it is gone.
            DELETE FROM custody.delayed d WHERE d.delay_id IN (SELECT u.delay_id FROM due u) RETURNING d.*
        )
        SELECT (SELECT max(u.deliver_at) FROM due u) AS until,
               array_agg(t.key ORDER BY t.deliver_at, t.delay_id) AS keys,
               array_agg(t.kind ORDER BY t.deliver_at, t.delay_id) AS kinds,
               array_agg(t.payload ORDER BY t.deliver_at, t.delay_id) AS payloads,
               array_agg(t.headers::text ORDER BY t.deliver_at, t.delay_id) AS headers
        INTO v_due FROM taken t;
        IF v_due.payloads IS NOT NULL THEN
            PERFORM custody.put_at_head(p_head, v_due.keys, v_due.kinds, v_due.payloads, v_due.headers, p_now);
        END IF;
        v_until := v_due.until;
        -- The next scan starts here, behind the rows that are gone: while an old snapshot is held, their index entries
        -- stay.
        IF v_until > (p_head).delayed_from THEN
            UPDATE custody.heads h SET delayed_from = v_until
            WHERE h.topic_id = (p_head).topic_id AND h.partition = (p_head).partition;
            p_head.delayed_from := v_until;
        END IF;
    END IF;
    RETURN p_head;
END $$;

-- When the next delayed message of a partition is due; null if none waits.
CREATE FUNCTION custody.next_delivery(p_head custody.heads) RETURNS timestamptz
LANGUAGE sql STABLE AS $$
    SELECT min(d.deliver_at) FROM custody.delayed d
    WHERE (p_head).delayed_from IS NOT NULL
      AND d.topic_id = (p_head).topic_id AND d.partition = (p_head).partition AND d.deliver_at >= (p_head).delayed_from
$$;

-- The messages that wait, the next one first. With p_bytes the list ends with the message that reaches so much payload.
CREATE FUNCTION custody.delayed_messages(
    p_topic text, p_key text DEFAULT NULL, p_limit int DEFAULT 100, p_bytes bigint DEFAULT NULL
)
RETURNS TABLE (delay_id bigint, partition int, deliver_at timestamptz, key text, kind "char", payload bytea,
               headers jsonb, delayed_at timestamptz)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
BEGIN
    RETURN QUERY
    SELECT x.delay_id, x.partition, x.deliver_at, x.key, x.kind, x.payload, x.headers, x.delayed_at
    FROM (
        SELECT w.*, sum(octet_length(w.payload)) OVER (ORDER BY w.deliver_at, w.delay_id)
            - octet_length(w.payload) AS before
        FROM custody.heads h
        CROSS JOIN LATERAL (
            SELECT * FROM custody.delayed d
            WHERE d.topic_id = h.topic_id AND d.partition = h.partition AND d.deliver_at >= h.delayed_from
              AND (p_key IS NULL OR d.key = p_key)
            ORDER BY d.deliver_at, d.delay_id LIMIT p_limit) w
        WHERE h.topic_id = v_topic.topic_id
    ) x
    WHERE p_bytes IS NULL OR x.before < p_bytes
    ORDER BY x.deliver_at, x.delay_id LIMIT p_limit;
END $$;

CREATE FUNCTION custody.delayed_count(p_topic text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT count(*) FROM custody.delayed d WHERE d.topic_id = (custody.topic_named(p_topic)).topic_id
$$;

-- Cancels a message that still waits.
CREATE FUNCTION custody.cancel_delayed(p_topic text, p_delay_id bigint) RETURNS timestamptz
LANGUAGE plpgsql AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_due   timestamptz;
BEGIN
    PERFORM custody.require_read_committed();
    DELETE FROM custody.delayed d WHERE d.delay_id = p_delay_id AND d.topic_id = v_topic.topic_id RETURNING d.deliver_at
    INTO v_due;
    IF NOT FOUND THEN
        PERFORM custody.refuse('delay_not_found',
            format('no delayed message %s waits in topic %L', p_delay_id, p_topic),
            'It was delivered or cancelled already, or is of another topic.');
    END IF;
    RETURN v_due;
END $$;
