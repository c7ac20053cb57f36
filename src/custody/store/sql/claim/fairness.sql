-- Fairness: keys or tenants of a group are served in turn. A claim parks the messages of a key beyond its share, and
-- reads further ahead for the others. All of this runs under the cursor's lock.

-- Whose turn a message takes: that of its key, or of the tenant that the key begins with.
CREATE FUNCTION custody.served_as(p_group custody.groups, p_key text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE (p_group).fairness WHEN 'tenant' THEN split_part(p_key, (p_group).tenant_separator, 1) ELSE p_key END
$$;

-- What `awaited` records of a key that has just had its turn, or begins to wait for one.
CREATE FUNCTION custody.turn_of(p_group custody.groups, p_key text) RETURNS TABLE (tenant text, turn xid8)
LANGUAGE sql STABLE AS $$
    SELECT CASE (p_group).fairness WHEN 'tenant' THEN custody.served_as(p_group, p_key) WHEN 'key' THEN '' END,
           CASE WHEN (p_group).fairness IS NOT NULL THEN pg_current_xact_id() END
$$;

-- The awaited keys that are not known to be in flight and had their turn longest ago, some of each tenant. Their number
-- is bounded, however many there are.
CREATE FUNCTION custody.next_in_turn(p_group_id int, p_partition int, p_in_flight int8multirange)
RETURNS TABLE (key text, tid tid)
LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tenants AS (
        (SELECT a.tenant, 1 AS n FROM custody.awaited a
         WHERE a.group_id = p_group_id AND a.partition = p_partition ORDER BY a.tenant LIMIT 1)
        UNION ALL
        SELECT (SELECT a.tenant FROM custody.awaited a
                WHERE a.group_id = p_group_id AND a.partition = p_partition AND a.tenant > t.tenant
                ORDER BY a.tenant LIMIT 1), t.n + 1
        FROM tenants t WHERE t.tenant IS NOT NULL AND t.n < 1000
    )
    SELECT k.key, k.tid
    FROM (
        SELECT a.key, a.tid FROM tenants t
        CROSS JOIN LATERAL (
            SELECT x.key, x.ctid AS tid FROM custody.awaited x
            WHERE x.group_id = p_group_id AND x.partition = p_partition AND x.tenant = t.tenant
              AND NOT coalesce(p_in_flight @> x.behind, false)
            ORDER BY x.turn LIMIT greatest(8, 1000 / (SELECT count(*) FROM tenants))) a
        UNION
        -- If there are more tenants than are read by name: the keys that have waited longest.
        (SELECT x.key, x.ctid FROM custody.awaited x
         WHERE x.group_id = p_group_id AND x.partition = p_partition AND x.tenant IS NOT NULL
           AND NOT coalesce(p_in_flight @> x.behind, false) AND (SELECT count(*) FROM tenants) >= 1000
         ORDER BY x.turn LIMIT 1000)
        UNION
        -- Keys from before the group was fair.
        (SELECT x.key, x.ctid FROM custody.awaited x
         WHERE x.group_id = p_group_id AND x.partition = p_partition AND x.tenant IS NULL
           AND NOT coalesce(p_in_flight @> x.behind, false) LIMIT 1000)) k
$$;

-- How many messages each gets of p_room, if all get the same and those with fewer leave the rest to the others. The
-- first ones get the remainder.
CREATE FUNCTION custody.fair_shares(p_have bigint[], p_room bigint) RETURNS bigint[]
LANGUAGE sql IMMUTABLE AS $$
    WITH sorted AS MATERIALIZED (
        SELECT h.have, h.n, count(*) OVER () - row_number() OVER w + 1 AS rest, sum(h.have) OVER w - h.have AS before
        FROM unnest(p_have) WITH ORDINALITY h (have, n) WINDOW w AS (ORDER BY h.have, h.n)
    ), given AS (
        SELECT s.n, s.have, least(s.have, (
            -- The level up to which all can be filled: from here on everybody has at least that.
            SELECT floor((p_room - l.before) / l.rest) FROM sorted l WHERE l.have * l.rest >= p_room - l.before
            ORDER BY l.rest DESC LIMIT 1))::bigint AS share
        FROM sorted s
    )
    SELECT array_agg(CASE WHEN g.have > g.share AND g.place <= p_room - g.shared THEN g.share + 1 ELSE g.share END
                     ORDER BY g.n)
    FROM (SELECT x.*, sum(x.share) OVER () AS shared,
                 count(*) FILTER (WHERE x.have > x.share) OVER (ORDER BY x.n) AS place FROM given x) g
$$;

-- Parks a set of messages for each key. A few are parked as usual, many in runs of at most 64 ranges, because a claim
-- rewrites a run when it takes a part of it.
CREATE FUNCTION custody.park_sets(
    p_group custody.groups, p_partition int, p_keys text[], p_sets int8multirange[], p_now timestamptz
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_few constant int := 64;
BEGIN
    PERFORM custody.park((p_group).group_id, p_partition, array_agg(o.o), array_agg(m.k), 0, NULL, NULL, NULL, p_now,
                         true)
    FROM unnest(p_keys, p_sets) m (k, s), unnest(custody.offsets_list(m.s)) o (o)
    WHERE custody.cardinality(m.s) <= v_few
    HAVING count(*) > 0;
    WITH runs AS (
        INSERT INTO custody.parked
        SELECT (p_group).group_id, p_partition, x.k, min(lower(x.r)), range_agg(x.r), sum(upper(x.r) - lower(x.r)),
               p_now
        FROM (SELECT m.k, r.r, (r.n - 1) / 64 AS run
              FROM unnest(p_keys, p_sets) m (k, s), unnest(m.s) WITH ORDINALITY r (r, n)
              WHERE custody.cardinality(m.s) > v_few) x
        GROUP BY x.k, x.run
        RETURNING ranges)
    INSERT INTO custody.journal (at, kind, group_id, partition, offsets)
    SELECT p_now, 'park', (p_group).group_id, p_partition, range_agg(ranges) FROM runs HAVING count(*) > 0;
END $$;

-- Takes fresh messages from the frontier on, and parked messages of the keys that are ready, up to p_max. If there are
-- both, each kind gets half; a single message goes to each in turn. Without p_until no fresh messages are taken.
CREATE FUNCTION custody.take_fairly(
    p_group custody.groups, p_head custody.heads, p_in_flight int8multirange, p_ready text[], p_at custody.frontiers,
    p_until bigint, p_max int, p_now timestamptz, OUT taken int8multirange, OUT frontier bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_parked bigint := 0;
    v_want   int;
    v_fresh  record;
BEGIN
    taken := '{}';
    frontier := (p_at).frontier;
    IF cardinality(p_ready) > 0 THEN
        SELECT least(coalesce(sum(p.messages), 0), CASE WHEN p_max = 1 THEN (p_at).claim_no % 2 ELSE p_max / 2 END)
        INTO v_parked
        FROM (SELECT x.messages FROM custody.parked x
              WHERE x.group_id = (p_at).group_id AND x.partition = (p_at).partition AND x.key = ANY (p_ready)
              LIMIT p_max) p;
    END IF;
    v_want := p_max - v_parked;
    IF p_until > frontier AND v_want > 0 THEN
        IF (p_group).max_parked IS NULL AND custody.varied(p_group, p_head, p_in_flight, frontier, p_until) THEN
            v_fresh := custody.take_fresh(p_group, p_head, p_in_flight, frontier, p_until, v_want, p_now);
        ELSE
            v_fresh := custody.take_fresh_fairly(p_group, p_head, p_in_flight, frontier, p_until, v_want, p_now);
        END IF;
        taken := v_fresh.taken;
        frontier := v_fresh.frontier;
    END IF;
    v_parked := p_max - custody.cardinality(taken);
    IF v_parked > 0 AND cardinality(p_ready) > 0 THEN
        taken := taken + custody.take_parked_fairly(p_group, (p_at).partition, p_ready, v_parked,
            -- If they share single messages with the fresh ones, they have every second claim.
            CASE WHEN p_max = 1 AND p_until > (p_at).frontier THEN (p_at).claim_no / 2 ELSE (p_at).claim_no END);
    END IF;
END $$;

-- Whether nobody floods the partition: at least half of the next messages that could be handed out are of different
-- keys or tenants.
CREATE FUNCTION custody.varied(
    p_group custody.groups, p_head custody.heads, p_in_flight int8multirange, p_from bigint, p_until bigint
) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_look constant int := 64;
    v_keys text[];
    v_gone text[];
BEGIN
    SELECT array_agg(k.key) INTO v_keys
    FROM custody.keys_of(p_head, int8multirange(int8range(p_from, least(p_until, p_from + v_look)))) k;
    SELECT array_agg(DISTINCT k) INTO v_gone FROM unnest(v_keys) k WHERE k IS NOT NULL;
    IF p_in_flight IS NOT NULL THEN
        v_gone := (custody.keys_in_flight(p_head, p_in_flight, v_gone)).keys
            || ARRAY(SELECT key FROM custody.open_heads((p_group).group_id, (p_head).partition, v_gone));
    ELSE
        v_gone := ARRAY(SELECT key FROM custody.open_heads((p_group).group_id, (p_head).partition, v_gone));
    END IF;
    RETURN count(*) * 2 >= cardinality(v_keys)
        AND (count(DISTINCT custody.served_as(p_group, k)) + count(*) FILTER (WHERE k IS NULL)) * 2 >= count(*)
    FROM unnest(v_keys) k WHERE k IS NULL OR NOT k = ANY (v_gone);
END $$;

-- As take_fresh, if somebody floods the partition. It reads the log until there are enough other keys or tenants, or to
-- the end of a bounded range, and gives each the same share. Messages that are not taken are parked, so each is read
-- only once. Messages without a key cannot be parked: they are taken as they come, and the reading stops when they fill
-- the lease.
CREATE FUNCTION custody.take_fresh_fairly(
    p_group custody.groups, p_head custody.heads, p_in_flight int8multirange, p_frontier bigint, p_until bigint,
    p_max int, p_now timestamptz, OUT taken int8multirange, OUT frontier bigint
)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_partition constant int := (p_head).partition;
    v_enough  constant int := greatest(p_max, 64);
    v_limit   bigint := least(p_until, p_frontier + greatest(131072, p_max));
    v_room    bigint;                     -- how many messages may be parked; null: any number
    v_step    bigint := v_enough;
    v_until   bigint;
    v_read    record;
    v_unique  text[];
    v_busy    custody.busy := ROW('{}', '{}');
    v_blocked text[];
    v_loose   int8multirange := '{}';     -- messages without a key
    -- Of the messages read so far: the keys that are free, whose turn they take, and their messages,
    v_keys    text[] := '{}';
    v_names   text[] := '{}';
    v_sets    int8multirange[] := '{}';
    v_behind  text[] := '{}';             -- and those that are blocked
    v_parked  int8multirange[] := '{}';
    v_seen    bigint := 0;
BEGIN
    frontier := p_frontier;
    IF (p_group).max_parked IS NOT NULL THEN
        SELECT greatest(0, (p_group).max_parked - coalesce(sum(p.messages), 0) - (
            SELECT count(*) FROM custody.cases c
            WHERE c.group_id = (p_group).group_id AND c.partition = v_partition AND c.state = 'parked'))
        INTO v_room FROM custody.parked p WHERE p.group_id = (p_group).group_id AND p.partition = v_partition;
        v_limit := least(v_limit, p_frontier + v_enough + v_room);
    END IF;
    WHILE frontier < v_limit LOOP
        v_until := least(v_limit, frontier + v_step);
        v_step := least(v_step * 4, greatest(20000, v_enough));
        SELECT array_agg(g.key) AS keys, array_agg(g.ranges) AS sets INTO v_read
        FROM (
            SELECT i.key, range_agg(i.r) AS ranges
            FROM (SELECT k.key, int8range(min(k."offset"), max(k."offset") + 1) AS r
                  FROM (SELECT e."offset", e.key,
                               e."offset" - row_number() OVER (PARTITION BY e.key ORDER BY e."offset") AS island
                        FROM custody.keys_of(p_head, int8multirange(int8range(frontier, v_until))) e) k
                  GROUP BY k.key, k.island) i
            GROUP BY i.key) g;
        -- Messages without a key that do not fit any more stay in the log, with all behind them.
        SELECT CASE WHEN custody.cardinality(x.first) > p_max THEN upper(x.first) - 1 ELSE v_until END INTO v_until
        FROM (SELECT custody.first_offsets(v_loose
                                           + coalesce((SELECT m.s FROM unnest(v_read.keys, v_read.sets) m (k, s)
                                                       WHERE m.k IS NULL), '{}'), p_max + 1) AS first) x;
        EXIT WHEN v_until = frontier;
        v_unique := array_remove(v_read.keys, NULL);
        IF p_in_flight IS NOT NULL THEN
            v_busy := custody.keys_in_flight(p_head, p_in_flight, v_unique);
        END IF;
        SELECT v_busy.keys || coalesce(array_agg(key), '{}') INTO v_blocked
        FROM custody.open_heads((p_group).group_id, v_partition, v_unique);
        SELECT v_keys || coalesce(array_agg(m.k) FILTER (WHERE m.free), '{}') AS keys,
               v_names || coalesce(array_agg(custody.served_as(p_group, m.k)) FILTER (WHERE m.free), '{}') AS names,
               v_sets || coalesce(array_agg(m.s) FILTER (WHERE m.free), '{}') AS sets,
               v_behind || coalesce(array_agg(m.k) FILTER (WHERE NOT m.free), '{}') AS behind,
               v_parked || coalesce(array_agg(m.s) FILTER (WHERE NOT m.free), '{}') AS parked,
               v_loose + coalesce(range_agg(m.s) FILTER (WHERE m.k IS NULL), '{}') AS loose
        INTO v_read
        FROM (SELECT x.k, x.s * int8multirange(int8range(NULL, v_until)) AS s,
                     CASE WHEN x.k IS NOT NULL THEN b.k IS NULL END AS free
              FROM unnest(v_read.keys, v_read.sets) x (k, s)
              LEFT JOIN (SELECT DISTINCT unnest(v_blocked) AS k) b ON b.k = x.k) m
        WHERE NOT isempty(m.s);
        v_keys := v_read.keys;
        v_names := v_read.names;
        v_sets := v_read.sets;
        v_behind := v_read.behind;
        v_parked := v_read.parked;
        v_loose := v_read.loose;
        frontier := v_until;
        v_seen := (SELECT count(DISTINCT n) FROM unnest(v_names) n) + custody.cardinality(v_loose);
        EXIT WHEN v_seen >= v_enough;
    END LOOP;
    IF v_seen >= v_enough THEN
        -- Enough: all behind the first message of the last key or tenant that is needed stays in the log.
        SELECT max(x.o) + 1 INTO frontier
        FROM (SELECT min(lower(m.s)) AS o FROM unnest(v_names, v_sets) m (n, s) GROUP BY m.n
              UNION ALL SELECT unnest(custody.offsets_list(v_loose))
              ORDER BY 1 LIMIT v_enough) x;
    END IF;
    LOOP
        WITH line AS MATERIALIZED (
            SELECT m.k, m.n, range_agg(m.s) * int8multirange(int8range(NULL, frontier)) AS s
            FROM unnest(v_keys, v_names, v_sets) m (k, n, s)
            WHERE lower(m.s) < frontier GROUP BY m.k, m.n
        ), named AS MATERIALIZED (
            SELECT l.n, range_agg(l.s) AS s, custody.cardinality(range_agg(l.s)) AS have,
                   row_number() OVER (ORDER BY min(lower(l.s))) AS place FROM line l GROUP BY l.n
        ), shares AS MATERIALIZED (
            SELECT s.share, s.place FROM unnest(custody.fair_shares(
                (SELECT array_agg(d.have ORDER BY d.place) FROM named d),
                p_max - custody.cardinality(v_loose * int8multirange(int8range(NULL, frontier)))
            )) WITH ORDINALITY s (share, place)
        ), given AS MATERIALIZED (
            SELECT d.n, CASE WHEN s.share >= d.have THEN d.s ELSE custody.first_offsets(d.s, s.share) END AS s
            FROM named d JOIN shares s USING (place)
        ), rest AS (
            SELECT l.k, l.s - g.s AS s FROM line l JOIN given g USING (n)
            UNION ALL
            SELECT m.k, m.s * int8multirange(int8range(NULL, frontier)) FROM unnest(v_behind, v_parked) m (k, s)
        )
        SELECT (SELECT coalesce(range_agg(g.s), '{}') FROM given g)
            + v_loose * int8multirange(int8range(NULL, frontier)) AS taken,
               array_agg(r.k) AS keys, array_agg(r.s) AS sets, coalesce(range_agg(r.s), '{}') AS parked
        INTO v_read FROM (SELECT x.k, range_agg(x.s) AS s FROM rest x WHERE NOT isempty(x.s) GROUP BY x.k) r;
        -- Only so many may be parked: the others stay in the log, with all behind them.
        EXIT WHEN v_room IS NULL OR v_room >= custody.cardinality(v_read.parked);
        frontier := upper(custody.first_offsets(v_read.parked, v_room + 1)) - 1;
    END LOOP;
    taken := v_read.taken;
    IF v_read.keys IS NOT NULL THEN
        PERFORM custody.park_sets(p_group, v_partition, v_read.keys, v_read.sets, p_now);
        -- Keys behind a case are woken when it is resolved, all others by the next claim that finds them free.
        PERFORM custody.await(p_group, v_partition, ROW(v_read.keys, NULL)::custody.busy);
    END IF;
END $$;

-- Takes up to p_max parked messages: the same number of each key, or of each tenant and then of each of its keys,
-- beginning with those that had their turn longest ago. Keys that still have open messages go to the end of the line.
CREATE FUNCTION custody.take_parked_fairly(
    p_group custody.groups, p_partition int, p_keys text[], p_max bigint, p_turn bigint
) RETURNS int8multirange
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_picked record;
BEGIN
    WITH runs AS MATERIALIZED (
        SELECT r.*, h.most
        FROM (SELECT o.key, o.case_offset,
                     least(p_max, (SELECT a.most FROM custody.awaited a
                                   WHERE a.group_id = (p_group).group_id AND a.partition = p_partition
                                     AND a.key = o.key)) AS most
              FROM custody.open_heads((p_group).group_id, p_partition, p_keys) o) h
        CROSS JOIN LATERAL custody.runs_of((p_group).group_id, p_partition, h.key, h.case_offset, h.most / 64 + 2) r
        WHERE r.before < h.most
    ), keys AS (
        SELECT r.key, custody.served_as(p_group, r.key) AS name, least(sum(r.messages), min(r.most))::bigint AS have,
               row_number() OVER (ORDER BY (SELECT a.turn FROM custody.awaited a WHERE a.group_id = (p_group).group_id
                                            AND a.partition = p_partition AND a.key = r.key) NULLS FIRST,
                                            min(r.first_offset)) AS turn
        FROM runs r GROUP BY r.key
    ), names AS (
        SELECT n.*, CASE WHEN (p_group).fairness = 'key' THEN n.turn
                    -- The keys of a tenant come and go. So tenants are taken in the order of their names, beginning
                    -- with another one each time.
                    ELSE (row_number() OVER (ORDER BY n.name) + count(*) OVER ()
                          - p_turn * p_max % count(*) OVER ()) % count(*) OVER () END AS place
        FROM (SELECT k.name, sum(k.have)::bigint AS have, min(k.turn) AS turn, array_agg(k.key ORDER BY k.turn) AS keys,
                     array_agg(k.have ORDER BY k.turn) AS haves FROM keys k GROUP BY k.name) n
    ), served AS MATERIALIZED (
        SELECT x.key, x.share
        FROM (SELECT array_agg(n.name ORDER BY n.place) AS names,
                     custody.fair_shares(array_agg(n.have ORDER BY n.place), p_max) AS shares FROM names n) s,
             unnest(s.names, s.shares) u (name, share)
        JOIN names n USING (name),
             unnest(n.keys, CASE WHEN cardinality(n.keys) = 1 THEN ARRAY[u.share]
                                 ELSE custody.fair_shares(n.haves, u.share) END) x (key, share)
    ), parts AS MATERIALIZED (
        SELECT r.key, r.tid, r.ranges, r.parked_at,
               custody.first_of_run(r.ranges, r.until, r.messages, (s.share - r.before)::bigint) AS part
        FROM runs r JOIN served s ON s.key = r.key
        WHERE r.before < s.share
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
