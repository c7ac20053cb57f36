-- The three sources of a claim besides the parked messages: returned ranges, due cases, the log. All of this runs under
-- the cursor's lock.

-- Takes from the returned ranges, the lowest offset first, as parts of the lease. A range with a chunk is leased alone
-- and in pieces of at most that size, so that the message that kills its workers ends up alone.
-- p_oldest: what came back first goes first; otherwise a message that is given back each time would keep those behind
-- it waiting. Ranges with a chunk go before it, because they come to an end. With ordering by key only the first row is
-- taken this way, and only if few messages lie before it: those block their keys, as if they were in flight.
CREATE FUNCTION custody.take_returned(
    p_group custody.groups, p_head custody.heads, p_in_flight int8multirange, p_max int, p_oldest boolean,
    p_now timestamptz, OUT parts custody.leases[], OUT taken int, OUT chunked boolean
)
LANGUAGE plpgsql AS $$
DECLARE
    v_ordered boolean := (p_group).ordering = 'key';
    v_oldest  boolean := p_oldest;
    v_row     custody.returned;
    v_next    bigint;
    v_held    int8multirange;
    v_piece   int8multirange;
    v_keys    text[];
    v_offsets bigint[];
    v_blocked bigint[];
    v_behind  text[];
    v_busy    custody.busy;
BEGIN
    parts := '{}';
    taken := 0;
    chunked := false;
    LOOP
        SELECT * INTO v_row FROM custody.returned
        WHERE group_id = (p_group).group_id AND partition = (p_head).partition
          AND NOT (v_oldest AND rewound AND (p_group).matcher IS NOT NULL)
        ORDER BY v_oldest AND chunk IS NULL, CASE WHEN v_oldest AND chunk IS NULL THEN return_id END,
            lower(ranges) LIMIT 1;
        IF NOT FOUND AND v_oldest THEN
            v_oldest := false;
            CONTINUE;
        END IF;
        EXIT WHEN NOT FOUND OR taken >= p_max OR (v_row.chunk IS NOT NULL AND taken > 0)
            OR (v_row.rewound AND (p_group).matcher IS NOT NULL);      -- has to be matched first: see sift_rewound
        v_piece := custody.first_offsets(v_row.ranges, least(p_max - taken, v_row.chunk));
        v_held := p_in_flight;
        IF v_ordered AND v_oldest THEN
            v_oldest := false;
            SELECT range_agg(ranges) * int8multirange(int8range(NULL, upper(v_piece))) INTO v_held FROM custody.returned
            WHERE group_id = (p_group).group_id AND partition = (p_head).partition AND return_id <> v_row.return_id;
            CONTINUE WHEN custody.cardinality(v_held) > 100;
            v_held := coalesce(v_held + p_in_flight, v_held, p_in_flight);
        ELSIF v_ordered THEN
            -- Another row may hold offsets in between: no higher offset goes before those.
            SELECT min(lower(ranges)) INTO v_next FROM custody.returned
            WHERE group_id = (p_group).group_id AND partition = (p_head).partition AND return_id <> v_row.return_id;
            IF v_next IS NOT NULL THEN
                v_piece := v_piece * int8multirange(int8range(NULL, v_next));
            END IF;
        END IF;
        IF v_piece = v_row.ranges THEN
            DELETE FROM custody.returned
            WHERE group_id = v_row.group_id AND partition = v_row.partition AND return_id = v_row.return_id;
        ELSE
            UPDATE custody.returned SET ranges = ranges - v_piece
            WHERE group_id = v_row.group_id AND partition = v_row.partition AND return_id = v_row.return_id;
        END IF;
        IF v_ordered THEN
            SELECT array_agg(k."offset"), array_agg(k.key) INTO v_offsets, v_keys
            FROM custody.keys_of(p_head, v_piece) k WHERE k.key IS NOT NULL;
            v_busy := ROW('{}', '{}');
            IF v_held IS NOT NULL THEN
                v_busy := custody.keys_in_flight(p_head, v_held, v_keys);
            END IF;
            SELECT array_agg(m.o), array_agg(m.k) INTO v_blocked, v_behind
            FROM unnest(v_offsets, v_keys) m (o, k)
            LEFT JOIN custody.open_heads((p_group).group_id, (p_head).partition,
                                         (SELECT array_agg(DISTINCT x) FROM unnest(v_keys) x)) h ON h.key = m.k
            WHERE m.k IN (SELECT unnest(v_busy.keys)) OR h.lowest < m.o;
            IF v_blocked IS NOT NULL THEN
                PERFORM custody.park(v_row.group_id, v_row.partition, v_blocked, v_behind, v_row.attempts,
                                     v_row.first_delivery, v_row.last_error, v_row.chunk, p_now, true);
                PERFORM custody.await(p_group, v_row.partition, v_busy);
                v_piece := v_piece - custody.offsets_set(v_blocked);
            END IF;
        END IF;
        CONTINUE WHEN isempty(v_piece);
        parts := parts || ROW(v_row.group_id, v_row.partition, 0, cardinality(parts) + 1, NULL, v_piece,
                              custody.cardinality(v_piece), 0, false, v_row.attempts + 1, 0, p_now, p_now, NULL,
                              v_row.first_delivery, v_row.last_error)::custody.leases;
        taken := taken + custody.cardinality(v_piece)::int;
        chunked := v_row.chunk IS NOT NULL;
        EXIT WHEN chunked;
    END LOOP;
END $$;

-- Takes the cases that are due at p_due, the longest due first, and with the room that is left the cases that follow
-- them in their keys without a gap, the keys in turn; of a key that has failed only a few. Cases of a blocked key are
-- parked, so that they do not hide the others in the due index. Cases from a lost lease are leased apart and in small
-- numbers: not if the lease has others already (p_others).
CREATE FUNCTION custody.take_due(
    p_group custody.groups, p_head custody.heads, p_in_flight int8multirange, p_max int, p_others boolean,
    p_worker text, p_now timestamptz, p_due timestamptz, OUT taken bigint[], OUT capped boolean
)
LANGUAGE plpgsql AS $$
DECLARE
    v_partition int := (p_head).partition;
    v_first     record;
    v_max       int;
    v_look      int := p_max;
    v_offsets   bigint[];
    v_keys      text[];
    v_failures  int[];
    v_busy      custody.busy := ROW('{}', '{}');
    v_found     record;
BEGIN
    taken := '{}';
    capped := false;
    -- Until something is found. Each round parks what is blocked, and looks further than the one before.
    WHILE p_max > 0 AND cardinality(taken) = 0 LOOP
        SELECT lease_cap INTO v_first FROM custody.cases
        WHERE group_id = (p_group).group_id AND partition = v_partition AND state = 'waiting' AND run_at <= p_due
          AND (lease_cap IS NULL OR NOT p_others)
        ORDER BY run_at, "offset" LIMIT 1;
        EXIT WHEN NOT FOUND;
        capped := v_first.lease_cap IS NOT NULL;
        v_max := least(p_max, v_first.lease_cap);
        SELECT array_agg(d."offset"), array_agg(d.key), array_agg(d.failures) INTO v_offsets, v_keys, v_failures
        FROM (SELECT c."offset", c.key, c.failures FROM custody.cases c
              WHERE c.group_id = (p_group).group_id AND c.partition = v_partition AND c.state = 'waiting'
                AND c.run_at <= p_due
                AND CASE WHEN capped THEN c.lease_cap >= v_max ELSE c.lease_cap IS NULL END
              ORDER BY c.run_at, c."offset" LIMIT v_look) d;
        IF (p_group).ordering = 'key' THEN
            IF p_in_flight IS NOT NULL THEN
                v_busy := custody.keys_in_flight(p_head, p_in_flight, v_keys);
            END IF;
            WITH RECURSIVE due AS MATERIALIZED (
                SELECT m.o, m.k, m.n, h.parked_offset,
                       coalesce((SELECT a.most FROM custody.awaited a
                                 WHERE a.group_id = (p_group).group_id AND a.partition = v_partition AND a.key = m.k),
                                CASE WHEN m.failures > 0 AND m.k IS NOT NULL THEN custody.comes_back_with(1) END)
                           AS most,
                       m.k IS NULL OR (NOT m.k IN (SELECT unnest(v_busy.keys)) AND h.lowest = m.o) AS free
                FROM unnest(v_offsets, v_keys, v_failures) WITH ORDINALITY m (o, k, failures, n)
                LEFT JOIN custody.open_heads((p_group).group_id, v_partition,
                                             (SELECT array_agg(DISTINCT x) FROM unnest(v_keys) x)) h ON h.key = m.k
            ), line (o, k, until, most, n) AS (
                -- The first case of each key, then the second ones, and so on. LIMIT stops it, and no case is chosen
                -- without those before it.
                (SELECT d.o, d.k, d.parked_offset, d.most, 1 FROM due d WHERE d.free ORDER BY d.n LIMIT v_max)
                UNION ALL
                SELECT c."offset", l.k, l.until, l.most, l.n + 1
                FROM line l
                CROSS JOIN LATERAL (
                    SELECT x."offset", x.state, x.run_at, x.lease_cap FROM custody.cases x
                    WHERE x.group_id = (p_group).group_id AND x.partition = v_partition AND x.key = l.k
                      AND x."offset" > l.o
                      AND (x.state <> 'dead' OR x.held)
                    ORDER BY x."offset" LIMIT 1) c
                WHERE (c.state = 'parked' OR c.state = 'waiting' AND c.run_at <= p_due)
                  AND coalesce(c."offset" < l.until, true) AND coalesce(l.n < l.most, true)
                  AND CASE WHEN capped THEN c.lease_cap >= v_max ELSE c.lease_cap IS NULL END
            ), chosen AS MATERIALIZED (
                SELECT l.o, l.k, l.most FROM line l LIMIT v_max
            ), full_keys AS (
                -- If none of these fails, twice as many come next.
                SELECT c.k, max(c.o) AS last, custody.twice(c.most) AS most FROM chosen c
                WHERE c.most IS NOT NULL GROUP BY c.k, c.most HAVING count(*) = c.most
            )
            SELECT (SELECT array_agg(d.o) FROM due d WHERE NOT d.free AND NOT d.o IN (SELECT c.o FROM chosen c))
                       AS blocked,
                   (SELECT array_agg(c.o) FROM chosen c) AS offsets, f.*
            INTO v_found
            FROM (SELECT array_agg(k) AS keys, array_agg(last) AS lasts, array_agg(most) AS most FROM full_keys) f;
            v_offsets := v_found.offsets;
            IF v_found.blocked IS NOT NULL THEN
                UPDATE custody.cases SET state = 'parked', updated_at = p_now
                WHERE group_id = (p_group).group_id AND partition = v_partition AND "offset" = ANY (v_found.blocked);
                PERFORM custody.await(p_group, v_partition, v_busy);
            END IF;
            PERFORM custody.comes_back(p_group, v_partition, v_found.keys, v_found.lasts, v_found.most);
        END IF;
        taken := coalesce(v_offsets[:v_max], '{}');
        v_look := greatest(v_look, least(v_look::bigint * 4, 10000));
    END LOOP;
    UPDATE custody.cases
    SET state = 'leased', attempts = attempts + 1, first_delivery = coalesce(first_delivery, p_now), worker = p_worker,
        updated_at = p_now
    WHERE group_id = (p_group).group_id AND partition = v_partition AND "offset" = ANY (taken);
END $$;

-- Takes fresh messages from the frontier on. Messages of a blocked key are parked on the way, so one key never holds up
-- the others. Only a bounded part of the log is read under the lock.
CREATE FUNCTION custody.take_fresh(
    p_group custody.groups, p_head custody.heads, p_in_flight int8multirange, p_frontier bigint, p_until bigint,
    p_max int, p_now timestamptz, OUT taken int8multirange, OUT frontier bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_scan_limit constant bigint := p_frontier + greatest(10000, p_max);
    v_want    bigint := p_max;
    v_until   bigint;
    v_offsets bigint[];
    v_keys    text[];
    v_unique  text[];
    v_busy    custody.busy;
    v_blocked text[];
    v_cut     bigint;
    v_free    int8multirange;
    v_parked  record;
BEGIN
    taken := '{}';
    frontier := p_frontier;
    WHILE frontier < p_until AND frontier < v_scan_limit AND v_want * 2 > p_max LOOP
        v_until := least(p_until, frontier + v_want + v_want / 4 + 16);
        v_busy := ROW('{}', '{}');
        v_blocked := NULL;
        IF p_in_flight IS NULL THEN
            v_blocked := custody.open_keys((p_group).group_id, (p_head).partition);
        END IF;
        IF v_blocked IS NOT NULL THEN
            -- With nothing in flight and few open keys, only the messages of those keys matter.
            SELECT array_agg(k."offset"), array_agg(k.key) INTO v_offsets, v_keys
            FROM custody.keys_of(p_head, int8multirange(int8range(frontier, v_until)), v_blocked) k;
        ELSE
            SELECT array_agg(k."offset"), array_agg(k.key) INTO v_offsets, v_keys
            FROM custody.keys_of(p_head, int8multirange(int8range(frontier, v_until))) k;
            SELECT array_agg(DISTINCT k) INTO v_unique FROM unnest(v_keys) k WHERE k IS NOT NULL;
            IF p_in_flight IS NOT NULL AND v_unique IS NOT NULL THEN
                v_busy := custody.keys_in_flight(p_head, p_in_flight, v_unique);
            END IF;
            SELECT v_busy.keys || coalesce(array_agg(key), '{}') INTO v_blocked
            FROM custody.open_heads((p_group).group_id, (p_head).partition, v_unique);
        END IF;
        IF cardinality(v_blocked) = 0 THEN
            v_cut := least(frontier + v_want, v_until);
            v_free := int8multirange(int8range(frontier, v_cut));
        ELSE
            SELECT array_agg(m.o ORDER BY m.o) AS offsets, array_agg(m.k ORDER BY m.o) AS keys INTO v_parked
            FROM unnest(v_offsets, v_keys) m (o, k) WHERE m.k IN (SELECT unnest(v_blocked));
            -- Each blocked message on the way moves the end by one.
            SELECT least(v_until, frontier + v_want + count(*)) INTO v_cut
            FROM unnest(v_parked.offsets) WITH ORDINALITY b (o, n) WHERE b.o - (b.n - 1) < frontier + v_want;
            SELECT array_agg(b.o) AS offsets, array_agg(b.k) AS keys INTO v_parked
            FROM unnest(v_parked.offsets, v_parked.keys) b (o, k) WHERE b.o < v_cut;
            v_free := int8multirange(int8range(frontier, v_cut))
                - custody.offsets_set(coalesce(v_parked.offsets, '{}'));
            IF v_parked.offsets IS NOT NULL THEN
                PERFORM custody.park((p_group).group_id, (p_head).partition, v_parked.offsets, v_parked.keys, 0, NULL,
                                     NULL, NULL, p_now, true);
                PERFORM custody.await(p_group, (p_head).partition, v_busy);
            END IF;
        END IF;
        taken := taken + v_free;
        v_want := p_max - custody.cardinality(taken);
        frontier := v_cut;
    END LOOP;
END $$;
