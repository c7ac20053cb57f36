-- The order rule: a message of key K is handed out only if no live lease holds any message of K, and every earlier
-- unresolved message of K is in the same lease. All of this runs under the cursor's lock.

-- Which of these keys have a message in flight.
CREATE FUNCTION custody.keys_in_flight(p_head custody.heads, p_in_flight int8multirange, p_keys text[]) RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(DISTINCT k.key), '{}') FROM custody.keys_of(p_head, p_in_flight, p_keys) k
$$;

-- The lowest unresolved message of each key that has a case or parked messages. If there are few open keys, all are
-- read at once. Among many only the given keys are probed, because reading all cases would cost too much.
CREATE FUNCTION custody.open_heads(p_group_id int, p_partition int, p_keys text[])
RETURNS TABLE (key text, case_offset bigint, case_state text, parked_offset bigint, lowest bigint)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_few constant int := 500;
BEGIN
    IF cardinality(p_keys) > 20 AND v_few > (
        SELECT count(*) FROM (
            SELECT FROM custody.cases c
            WHERE c.group_id = p_group_id AND c.partition = p_partition AND c.key IS NOT NULL
              AND (c.state <> 'dead' OR c.held)
            LIMIT v_few) x) + (
        SELECT count(*) FROM (
            SELECT FROM custody.parked p WHERE p.group_id = p_group_id AND p.partition = p_partition LIMIT v_few) x)
    THEN
        RETURN QUERY
        SELECT k.key, c."offset", c.state, p.first_offset, least(c."offset", p.first_offset)
        FROM (
            SELECT DISTINCT ON (x.key) x.key, x."offset", x.state FROM custody.cases x
            WHERE x.group_id = p_group_id AND x.partition = p_partition AND x.key IS NOT NULL
              AND (x.state <> 'dead' OR x.held)
            ORDER BY x.key, x."offset") c
        FULL JOIN (
            SELECT x.key, min(x.first_offset) AS first_offset FROM custody.parked x
            WHERE x.group_id = p_group_id AND x.partition = p_partition GROUP BY x.key) p ON p.key = c.key
        JOIN unnest(p_keys) k (key) ON k.key = coalesce(c.key, p.key);
        RETURN;
    END IF;
    RETURN QUERY
    SELECT k, c."offset", c.state, p.first_offset, least(c."offset", p.first_offset)
    FROM unnest(p_keys) k
    LEFT JOIN LATERAL (
        SELECT x."offset", x.state FROM custody.cases x
        WHERE x.group_id = p_group_id AND x.partition = p_partition AND x.key = k AND (x.state <> 'dead' OR x.held)
        ORDER BY x."offset" LIMIT 1) c ON true
    LEFT JOIN LATERAL (
        SELECT x.first_offset FROM custody.parked x
        WHERE x.group_id = p_group_id AND x.partition = p_partition AND x.key = k
        ORDER BY x.first_offset LIMIT 1) p ON true
    WHERE c."offset" IS NOT NULL OR p.first_offset IS NOT NULL;
END $$;

-- All keys that have something open, if they are few; else null.
CREATE FUNCTION custody.open_keys(p_group_id int, p_partition int) RETURNS text[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_few  constant int := 200;
    v_keys text[];
    v_rows int;
BEGIN
    SELECT array_agg(DISTINCT x.key), count(*) INTO v_keys, v_rows
    FROM (
        (SELECT c.key FROM custody.cases c
         WHERE c.group_id = p_group_id AND c.partition = p_partition AND c.key IS NOT NULL
           AND (c.state <> 'dead' OR c.held) LIMIT v_few)
        UNION ALL
        (SELECT p.key FROM custody.parked p WHERE p.group_id = p_group_id AND p.partition = p_partition LIMIT v_few)
    ) x;
    RETURN CASE WHEN v_rows < v_few THEN coalesce(v_keys, '{}') END;
END $$;

CREATE FUNCTION custody.await(p_group custody.groups, p_partition int, p_keys text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF (p_group).fairness IS NOT NULL THEN
        PERFORM custody.await_turn(p_group, p_partition, p_keys);
    ELSE
        INSERT INTO custody.awaited SELECT DISTINCT (p_group).group_id, p_partition, k FROM unnest(p_keys) k
        ON CONFLICT DO NOTHING;
    END IF;
END $$;

-- Parks messages behind their key: those that were never delivered in runs, the others as cases. With p_extend a short
-- run of the key is extended instead of starting another one. Only the holder of the cursor may do that: a claim would
-- have to wait for the transaction of a settle.
CREATE FUNCTION custody.park(
    p_group_id int, p_partition int, p_offsets bigint[], p_keys text[], p_attempts int, p_first_delivery timestamptz,
    p_last_error text, p_lease_cap int, p_now timestamptz, p_extend boolean
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(p_offsets) = 0 THEN
        RETURN;
    ELSIF p_attempts = 0 THEN
        WITH fresh AS MATERIALIZED (
            SELECT m.k AS key, range_agg(int8range(m.o, m.o + 1)) AS ranges, count(*) AS messages
            FROM unnest(p_offsets, p_keys) m (o, k) GROUP BY m.k
        ), longer AS (
            UPDATE custody.parked p SET ranges = p.ranges + f.ranges, messages = p.messages + f.messages
            FROM fresh f
            CROSS JOIN LATERAL (
                SELECT x.first_offset FROM custody.parked x
                WHERE p_extend AND x.group_id = p_group_id AND x.partition = p_partition AND x.key = f.key
                ORDER BY x.first_offset DESC LIMIT 1) last
            WHERE p.group_id = p_group_id AND p.partition = p_partition AND p.key = f.key
              AND p.first_offset = last.first_offset
              AND p.messages < 64 AND upper(p.ranges) <= lower(f.ranges)
            RETURNING p.key)
        INSERT INTO custody.parked
        SELECT p_group_id, p_partition, f.key, lower(f.ranges), f.ranges, f.messages, p_now
        FROM fresh f WHERE NOT f.key IN (SELECT l.key FROM longer l);
    ELSE
        INSERT INTO custody.cases (group_id, partition, "offset", key, state, attempts, failures, run_at, lease_cap,
                                   first_delivery, last_error, updated_at)
        SELECT p_group_id, p_partition, m.o, m.k, 'parked', p_attempts, 0, p_now, p_lease_cap, p_first_delivery,
               p_last_error, p_now
        FROM unnest(p_offsets, p_keys) m (o, k);
    END IF;
    INSERT INTO custody.journal (at, kind, group_id, partition, offsets)
    VALUES (p_now, 'park', p_group_id, p_partition, custody.offsets_set(p_offsets));
END $$;

-- Looks again at the keys that were freed or awaited. A parked case that is now the lowest of its key becomes due.
-- Returns the keys whose parked messages come next. Hints are read before the cases: whoever resolves a message after
-- this call has read the cases leaves a hint for the next claim, so no wake-up is lost.
CREATE FUNCTION custody.wake(
    p_group custody.groups, p_head custody.heads, p_in_flight int8multirange, p_now timestamptz
) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    v_partition int := (p_head).partition;
    v_hints     text[];
    v_awaited   text[];
    v_busy      text[] := '{}';
    v_open      text[];
    v_ready     text[];
BEGIN
    WITH taken AS (
        DELETE FROM custody.freed f
        WHERE f.group_id = (p_group).group_id AND f.partition = v_partition AND f.freed_id IN (
            SELECT freed_id FROM custody.freed WHERE group_id = (p_group).group_id AND partition = v_partition
            ORDER BY freed_id LIMIT 1000)
        RETURNING f.key)
    SELECT array_agg(DISTINCT key) INTO v_hints FROM taken;
    IF (p_group).fairness IS NOT NULL THEN
        v_awaited := custody.next_in_turn((p_group).group_id, v_partition);
    ELSE
        SELECT array_agg(key) INTO v_awaited FROM custody.awaited
        WHERE group_id = (p_group).group_id AND partition = v_partition;
    END IF;
    IF v_hints IS NULL AND v_awaited IS NULL THEN
        RETURN '{}';
    END IF;
    IF p_in_flight IS NOT NULL THEN
        v_busy := custody.keys_in_flight(p_head, p_in_flight, v_hints || v_awaited);
        IF (p_group).fairness IS NOT NULL AND cardinality(v_busy) * 2 > cardinality(v_awaited) THEN
            -- So keys that are in flight for long do not hide those behind them.
            UPDATE custody.awaited SET turn = pg_current_xact_id()
            WHERE group_id = (p_group).group_id AND partition = v_partition AND key = ANY (v_busy)
              AND tenant IS NOT NULL;
        END IF;
    END IF;
    SELECT array_agg(k) INTO v_open FROM (SELECT unnest(v_hints || v_awaited) AS k EXCEPT SELECT unnest(v_busy)) x;
    WITH heads AS MATERIALIZED (
        SELECT * FROM custody.open_heads((p_group).group_id, v_partition, v_open)
    ), due AS (
        UPDATE custody.cases c SET state = 'waiting', run_at = p_now, updated_at = p_now
        FROM heads h
        WHERE h.case_offset = h.lowest AND h.case_state = 'parked'
          AND c.group_id = (p_group).group_id AND c.partition = v_partition AND c."offset" = h.case_offset
    )
    SELECT array_agg(key ORDER BY parked_offset) INTO v_ready FROM heads WHERE parked_offset = lowest;
    DELETE FROM custody.awaited a
    USING (SELECT unnest(v_awaited) AS key EXCEPT SELECT unnest(v_busy || coalesce(v_ready, '{}'))) gone
    WHERE a.group_id = (p_group).group_id AND a.partition = v_partition AND a.key = gone.key;
    PERFORM custody.await(p_group, v_partition, array_agg(k))
    FROM (SELECT unnest(v_hints) AS k INTERSECT SELECT unnest(v_busy || coalesce(v_ready, '{}'))) x HAVING count(*) > 0;
    RETURN coalesce(v_ready, '{}');
END $$;

-- Takes up to p_max parked messages of these keys, in order within each key, the keys in turn. A key that still has
-- open messages stays awaited: it goes on when this lease is settled.
CREATE FUNCTION custody.take_parked(p_group custody.groups, p_partition int, p_keys text[], p_max int)
RETURNS int8multirange
LANGUAGE plpgsql AS $$
DECLARE
    v_taken int8multirange := '{}';
    v_left  bigint := p_max;
    v_run   record;
    v_part  int8multirange;
BEGIN
    FOR v_run IN
        SELECT p.key, p.first_offset, p.ranges, p.until, p.parked_at,
               CASE WHEN p.until < upper(p.ranges)
                    THEN custody.cardinality(p.ranges * int8multirange(int8range(0, p.until)))
                    ELSE p.messages END AS messages
        FROM custody.open_heads((p_group).group_id, p_partition, p_keys) h
        CROSS JOIN LATERAL (
            -- Runs of a key may overlap, and its cases lie between them: each run is taken up to the start of the next.
            SELECT x.*, row_number() OVER w AS turn, least(h.case_offset, lead(x.first_offset) OVER w) AS until
            FROM custody.parked x
            WHERE x.group_id = (p_group).group_id AND x.partition = p_partition AND x.key = h.key
              AND (h.case_offset IS NULL OR x.first_offset < h.case_offset)
            WINDOW w AS (ORDER BY x.first_offset)
            ORDER BY x.first_offset LIMIT p_max) p
        ORDER BY p.turn, p.first_offset
    LOOP
        EXIT WHEN v_left <= 0;
        v_part := v_run.ranges;
        IF v_run.until IS NOT NULL THEN
            v_part := v_part * int8multirange(int8range(0, v_run.until));
        END IF;
        IF v_run.messages > v_left THEN
            v_part := custody.first_offsets(v_part, v_left);
        END IF;
        DELETE FROM custody.parked
        WHERE group_id = (p_group).group_id AND partition = p_partition AND key = v_run.key
          AND first_offset = v_run.first_offset;
        IF v_part <> v_run.ranges THEN
            INSERT INTO custody.parked
            VALUES ((p_group).group_id, p_partition, v_run.key, lower(v_run.ranges - v_part), v_run.ranges - v_part,
                    custody.cardinality(v_run.ranges - v_part), v_run.parked_at);
        END IF;
        v_taken := v_taken + v_part;
        v_left := v_left - least(v_run.messages, v_left);
        -- Later runs of a key that was cut short must not overtake the rest of it.
        EXIT WHEN v_part <> v_run.ranges;
    END LOOP;
    DELETE FROM custody.awaited a
    WHERE a.group_id = (p_group).group_id AND a.partition = p_partition AND a.key = ANY (p_keys);
    PERFORM custody.await(p_group, p_partition, array_agg(h.key))
    FROM custody.open_heads((p_group).group_id, p_partition, p_keys) h
    HAVING count(*) > 0;
    RETURN v_taken;
END $$;
