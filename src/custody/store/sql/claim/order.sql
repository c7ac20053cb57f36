-- The order rule: a message of key K is handed out only if no live lease holds any message of K, and every earlier
-- unresolved message of K is in the same lease. All of this runs under the cursor's lock.

-- Keys that have a message in flight, and the last one of each.
CREATE TYPE custody.busy AS (keys text[], behind bigint[]);

-- Which of these keys have a message in flight.
CREATE FUNCTION custody.keys_in_flight(p_head custody.heads, p_in_flight int8multirange, p_keys text[])
RETURNS custody.busy
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(b.key), '{}'), coalesce(array_agg(b.behind), '{}')
    FROM (SELECT k.key, max(k."offset") AS behind FROM custody.keys_of(p_head, p_in_flight, p_keys) k GROUP BY k.key) b
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

-- How many messages a key comes back with whose message has failed so often: a few, and twice as many each time that
-- none of them fails; from 10,000 on any number.
CREATE FUNCTION custody.comes_back_with(p_failures int) RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_failures > 1 THEN 1 ELSE 4 END
$$;

CREATE FUNCTION custody.twice(p_most int) RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_most < 5000 THEN p_most * 2 END
$$;

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

-- Records keys that wait behind messages in flight.
CREATE FUNCTION custody.await(p_group custody.groups, p_partition int, p_busy custody.busy) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(p_busy.keys) > 0 THEN
        INSERT INTO custody.awaited AS a (group_id, partition, key, tenant, turn, behind)
        SELECT (p_group).group_id, p_partition, b.key, t.tenant, t.turn, b.behind
        FROM unnest(p_busy.keys, p_busy.behind) b (key, behind) CROSS JOIN LATERAL custody.turn_of(p_group, b.key) t
        ON CONFLICT (group_id, partition, key) DO UPDATE SET behind = excluded.behind
        WHERE a.behind IS DISTINCT FROM excluded.behind;
    END IF;
END $$;

-- Records how many messages keys that have failed may give next, and which ones of them are in flight.
CREATE FUNCTION custody.comes_back(
    p_group custody.groups, p_partition int, p_keys text[], p_behind bigint[], p_most int[]
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(p_keys) > 0 THEN
        INSERT INTO custody.awaited AS a (group_id, partition, key, tenant, turn, behind, most)
        SELECT (p_group).group_id, p_partition, k.key, t.tenant, t.turn, k.behind, k.most
        FROM unnest(p_keys, p_behind, p_most) k (key, behind, most)
        CROSS JOIN LATERAL custody.turn_of(p_group, k.key) t
        ON CONFLICT (group_id, partition, key) DO UPDATE
        SET behind = coalesce(excluded.behind, a.behind), most = excluded.most;
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
        -- ON CONFLICT finds the run by the index, whatever the planner thinks of the size of the table.
        INSERT INTO custody.parked
        SELECT p_group_id, p_partition, f.key, coalesce(l.first_offset, lower(f.ranges)),
               coalesce(l.ranges + f.ranges, f.ranges), coalesce(l.messages, 0) + f.messages, p_now
        FROM (SELECT m.k AS key, range_agg(int8range(m.o, m.o + 1)) AS ranges, count(*) AS messages
              FROM unnest(p_offsets, p_keys) m (o, k) GROUP BY m.k) f
        LEFT JOIN LATERAL (
            SELECT x.first_offset, x.ranges, x.messages FROM custody.parked x
            WHERE p_extend AND x.group_id = p_group_id AND x.partition = p_partition AND x.key = f.key
            ORDER BY x.first_offset DESC LIMIT 1) l ON l.messages < 64 AND upper(l.ranges) <= lower(f.ranges)
        ON CONFLICT (group_id, partition, key, first_offset) DO UPDATE
        SET ranges = excluded.ranges, messages = excluded.messages;
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

-- Looks again at the keys that were freed, and at those awaited ones whose message is not in flight any more. A parked
-- case that is now the lowest of its key becomes due. Returns the keys whose parked messages come next. Hints are read
-- before the cases: whoever resolves a message after this call has read the cases leaves a hint for the next claim, so
-- no wake-up is lost.
CREATE FUNCTION custody.wake(
    p_group custody.groups, p_head custody.heads, p_in_flight int8multirange, p_now timestamptz
) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    v_partition int := (p_head).partition;
    v_hints     record;
    v_awaited   record;
    v_busy      custody.busy := ROW('{}', '{}');
    v_open      text[];
    v_heads     record;
    v_kept      text[];
BEGIN
    WITH taken AS (
        DELETE FROM custody.freed f
        WHERE f.group_id = (p_group).group_id AND f.partition = v_partition AND f.freed_id IN (
            SELECT freed_id FROM custody.freed WHERE group_id = (p_group).group_id AND partition = v_partition
            ORDER BY freed_id LIMIT 1000)
        RETURNING f.key, f.most)
    SELECT array_agg(x.key) AS keys, array_agg(x.most) AS most INTO v_hints
    FROM (SELECT key, CASE WHEN bool_and(most IS NOT NULL) THEN min(most) END AS most FROM taken GROUP BY key) x;
    IF (p_group).fairness IS NOT NULL THEN
        SELECT array_agg(n.key) AS keys, array_agg(n.tid) AS tids INTO v_awaited
        FROM custody.next_in_turn((p_group).group_id, v_partition, p_in_flight) n;
    ELSE
        SELECT array_agg(key) AS keys, array_agg(ctid) AS tids INTO v_awaited FROM custody.awaited
        WHERE group_id = (p_group).group_id AND partition = v_partition
          AND NOT coalesce(p_in_flight @> behind, false);
    END IF;
    IF v_hints.keys IS NULL AND v_awaited.keys IS NULL THEN
        RETURN '{}';
    END IF;
    v_open := ARRAY(SELECT DISTINCT k FROM unnest(v_hints.keys || v_awaited.keys) k);
    IF p_in_flight IS NOT NULL THEN
        v_busy := custody.keys_in_flight(p_head, p_in_flight, v_open);
        v_open := ARRAY(SELECT k FROM unnest(v_open) k WHERE NOT k IN (SELECT unnest(v_busy.keys)));
    END IF;
    SELECT coalesce(array_agg(h.key ORDER BY h.parked_offset) FILTER (WHERE h.parked_offset = h.lowest), '{}') AS ready,
           array_agg(h.key) FILTER (WHERE h.case_offset = h.lowest AND h.case_state = 'parked') AS due_keys,
           array_agg(h.case_offset) FILTER (WHERE h.case_offset = h.lowest AND h.case_state = 'parked') AS due
    INTO v_heads FROM custody.open_heads((p_group).group_id, v_partition, v_open) h;
    IF v_heads.due IS NOT NULL THEN
        UPDATE custody.cases c SET state = 'waiting', run_at = p_now, updated_at = p_now
        WHERE c.group_id = (p_group).group_id AND c.partition = v_partition AND c."offset" = ANY (v_heads.due);
    END IF;
    v_kept := v_busy.keys || v_heads.ready || v_heads.due_keys;
    -- Only the holder of the cursor changes these rows, so they are where they were.
    DELETE FROM custody.awaited WHERE ctid = ANY (ARRAY(
        SELECT a.tid FROM unnest(v_awaited.keys, v_awaited.tids) a (key, tid)
        WHERE NOT a.key IN (SELECT unnest(v_kept))));
    PERFORM custody.await(p_group, v_partition, v_busy);
    -- A key that is coming back goes on with what it had; only an operator lifts that.
    SELECT array_agg(h.key) AS keys, array_agg(h.most) AS most INTO v_hints
    FROM unnest(v_hints.keys, v_hints.most) h (key, most)
    WHERE h.key IN (SELECT unnest(v_kept))
      AND (h.most IS NULL OR (SELECT a.most FROM custody.awaited a
                              WHERE a.group_id = (p_group).group_id AND a.partition = v_partition AND a.key = h.key
                              ) IS NULL);
    PERFORM custody.comes_back(p_group, v_partition, v_hints.keys, NULL, v_hints.most);
    RETURN v_heads.ready;
END $$;

-- Takes up to p_max parked messages of these keys, in order within each key, the keys in turn. A key that has failed
-- gives few, and twice as many the next time.
CREATE FUNCTION custody.take_parked(p_group custody.groups, p_partition int, p_keys text[], p_max int)
RETURNS int8multirange
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_picked record;
BEGIN
    WITH runs AS (
        SELECT r.*, least(r.messages, h.most - r.before) AS share
        FROM (SELECT o.key, o.case_offset,
                     least(p_max, (SELECT a.most FROM custody.awaited a
                                   WHERE a.group_id = (p_group).group_id AND a.partition = p_partition
                                     AND a.key = o.key)) AS most
              FROM custody.open_heads((p_group).group_id, p_partition, p_keys[:p_max]) o) h
        CROSS JOIN LATERAL custody.runs_of((p_group).group_id, p_partition, h.key, h.case_offset, h.most) r
        WHERE r.before < h.most
    ), line AS (
        SELECT r.*, p_max - (sum(r.share) OVER (ORDER BY r.turn, r.first_offset) - r.share)::bigint AS room FROM runs r
    ), parts AS MATERIALIZED (
        SELECT l.key, l.tid, l.ranges, l.parked_at,
               custody.first_of_run(l.ranges, l.until, l.messages, least(l.share, l.room)) AS part
        FROM line l WHERE l.room > 0
    )
    SELECT array_agg(p.key) AS keys, array_agg(p.tid) AS tids, array_agg(p.ranges - p.part) AS rests,
           array_agg(p.parked_at) AS times, array_agg(upper(p.part) - 1) AS lasts, range_agg(p.part) AS taken
    INTO v_picked FROM parts p;
    IF v_picked.keys IS NULL THEN
        RETURN '{}';
    END IF;
    PERFORM custody.cut_runs((p_group).group_id, p_partition, v_picked.keys, v_picked.tids, v_picked.rests,
                             v_picked.times);
    PERFORM custody.go_on(p_group, p_partition, v_picked.keys, v_picked.lasts);
    RETURN v_picked.taken;
END $$;

-- The first runs of a key, up to p_most messages before its first case. Runs may overlap, and cases lie between them:
-- each run is taken up to the start of the next (`until`), and none after a run that is cut short by that. `before`:
-- messages of the runs before it.
CREATE FUNCTION custody.runs_of(p_group_id int, p_partition int, p_key text, p_case_offset bigint, p_most bigint)
RETURNS TABLE (
    key text, tid tid, first_offset bigint, ranges int8multirange, parked_at timestamptz, turn bigint, until bigint,
    messages bigint, before bigint
)
LANGUAGE sql STABLE AS $$
    SELECT p_key, x.tid, x.first_offset, x.ranges, x.parked_at, x.turn, x.until, x.messages, x.before
    FROM (
        SELECT y.tid, y.first_offset, y.ranges, y.parked_at, y.turn, y.until, y.messages,
               (sum(y.messages) OVER w - y.messages)::bigint AS before,
               coalesce(bool_or(y.until IS NOT NULL) OVER (w ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false)
                   AS behind
        FROM (
            SELECT z.tid, z.first_offset, z.ranges, z.parked_at, z.turn,
                   CASE WHEN z.until < upper(z.ranges) THEN z.until END AS until,
                   CASE WHEN z.until < upper(z.ranges)
                        THEN custody.cardinality(z.ranges * int8multirange(int8range(0, z.until)))
                        ELSE z.messages END AS messages
            FROM (SELECT p.ctid AS tid, p.first_offset, p.ranges, p.parked_at, p.messages, row_number() OVER v AS turn,
                         least(p_case_offset, lead(p.first_offset) OVER v) AS until
                  FROM custody.parked p
                  WHERE p.group_id = p_group_id AND p.partition = p_partition AND p.key = p_key
                    AND (p_case_offset IS NULL OR p.first_offset < p_case_offset)
                  WINDOW v AS (ORDER BY p.first_offset) ORDER BY p.first_offset LIMIT p_most) z) y
        WINDOW w AS (ORDER BY y.first_offset)) x
    WHERE NOT x.behind
$$;

-- The first p_share messages of a run, before `until`.
CREATE FUNCTION custody.first_of_run(p_ranges int8multirange, p_until bigint, p_messages bigint, p_share bigint)
RETURNS int8multirange
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_until IS NULL AND p_messages <= p_share THEN p_ranges
                ELSE custody.first_offsets(p_ranges * int8multirange(int8range(0, p_until)), p_share) END
$$;

-- Replaces runs by what is left of them. Only the holder of the cursor changes runs, so they are where they were.
CREATE FUNCTION custody.cut_runs(
    p_group_id int, p_partition int, p_keys text[], p_tids tid[], p_rests int8multirange[], p_times timestamptz[]
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM custody.parked WHERE ctid = ANY (p_tids);
    INSERT INTO custody.parked
    SELECT p_group_id, p_partition, x.key, lower(x.rest), x.rest, custody.cardinality(x.rest), x.parked_at
    FROM unnest(p_keys, p_rests, p_times) x (key, rest, parked_at) WHERE NOT isempty(x.rest);
END $$;

-- Keys of which parked messages were taken, and the last ones of these: they go on when this lease is settled, and then
-- a key that has failed may give twice as many. With fairness they go to the end of the line.
CREATE FUNCTION custody.go_on(p_group custody.groups, p_partition int, p_keys text[], p_lasts bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO custody.awaited AS a (group_id, partition, key, tenant, turn, behind)
    SELECT (p_group).group_id, p_partition, x.k, t.tenant, t.turn, x.last
    FROM (SELECT k, max(o) AS last FROM unnest(p_keys, p_lasts) u (k, o) GROUP BY k) x
    CROSS JOIN LATERAL custody.turn_of(p_group, x.k) t
    ON CONFLICT (group_id, partition, key) DO UPDATE
    SET behind = excluded.behind, most = custody.twice(a.most), tenant = excluded.tenant, turn = excluded.turn;
END $$;
