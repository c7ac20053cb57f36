-- Claim: hands out up to n messages of one partition under one lease.

-- What one partition has to give, if wanted only of what is below p_until and of the retries that were due at p_due. The
-- caller holds its cursor, and copies what has died by it when it needs no other lock. Of a bound group at most p_look messages
-- are looked at; the reason is `passed` if none of those could be handed out, and there may be more to find behind them.
CREATE FUNCTION custody.claim_partition(
    p_group custody.groups, p_head custody.heads, p_max int, p_visibility interval, p_worker text, p_now timestamptz,
    p_until bigint DEFAULT NULL, p_due timestamptz DEFAULT NULL, p_look bigint DEFAULT 10000,
    OUT lease custody.leases, OUT parts int, OUT reason text, OUT died custody.death[], OUT looked bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    -- beyond this many messages in flight an ordered partition belongs to those who hold them
    v_exclusive constant int := 10000;
    v_ordered   boolean := (p_group).ordering = 'key';
    v_fair      boolean := (p_group).fairness IS NOT NULL;
    v_bound     boolean := (p_group).matcher IS NOT NULL;
    v_at        custody.frontiers := custody.position((p_group).group_id, (p_head).partition);
    v_live      record;
    v_odd       record;
    v_returned  record;
    v_due       record;
    v_tail      bigint := least((custody.tail(p_head)).next_offset, p_until);
    v_fresh     record;
    v_ready     text[] := '{}';
    v_want      bigint;
    v_retries   int;
    v_oldest    bigint;
    v_all       int8multirange;
BEGIN
    parts := 0;
    reason := 'empty';
    looked := 0;
    SELECT range_agg(held) AS held, coalesce(sum(remaining), 0) AS messages, min(claim_no) AS oldest, bool_or(deadline <= p_now) AS expired,
           EXISTS (SELECT FROM custody.outbox o WHERE o.topic_id = (p_head).topic_id AND o.partition = (p_head).partition
                   AND o.ended_at IS NULL AND o.available_at <= p_now) AS outbox
    INTO v_live
    FROM custody.leases
    WHERE group_id = v_at.group_id AND partition = v_at.partition AND claim_no >= v_at.oldest_claim;
    IF v_live.outbox AND custody.take_outbox(p_head, p_now) > 0 THEN
        v_tail := least((custody.tail(p_head)).next_offset, p_until);
    END IF;
    IF v_live.expired THEN
        died := custody.fold_expired(p_group, p_head, v_at.oldest_claim, p_now);
        SELECT range_agg(held) AS held, coalesce(sum(remaining), 0) AS messages, min(claim_no) AS oldest, false AS expired
        INTO v_live
        FROM custody.leases
        WHERE group_id = v_at.group_id AND partition = v_at.partition AND claim_no >= v_at.oldest_claim;
    END IF;
    IF v_ordered AND v_live.messages > v_exclusive THEN
        reason := 'busy';
        RETURN;
    END IF;

    -- min() walks to the first entry of an index; EXISTS makes a generic plan bet on a sequential scan to find one soon
    SELECT EXISTS (SELECT FROM custody.returned WHERE group_id = v_at.group_id AND partition = v_at.partition) AS returned,
           (SELECT min(run_at) FROM custody.cases WHERE group_id = v_at.group_id AND partition = v_at.partition
            AND state = 'waiting') AS next_due,
           v_ordered AND (
               EXISTS (SELECT FROM custody.freed WHERE group_id = v_at.group_id AND partition = v_at.partition)
               OR EXISTS (SELECT FROM custody.awaited WHERE group_id = v_at.group_id AND partition = v_at.partition)) AS hints,
           v_ordered AND (
               v_live.held IS NOT NULL
               OR EXISTS (SELECT FROM custody.parked WHERE group_id = v_at.group_id AND partition = v_at.partition)
               OR (SELECT min(key) FROM custody.cases WHERE group_id = v_at.group_id AND partition = v_at.partition
                   AND key IS NOT NULL AND (state <> 'dead' OR held)) IS NOT NULL) AS blocking
    INTO v_odd;

    SELECT '{}'::int8multirange AS taken, v_at.frontier AS frontier INTO v_fresh;
    SELECT '{}'::custody.leases[] AS parts, 0 AS taken, false AS chunked INTO v_returned;
    SELECT '{}'::bigint[] AS taken, false AS capped INTO v_due;
    IF v_odd.returned THEN
        v_want := p_max;
        LOOP
            IF v_bound THEN
                looked := looked + custody.sift_rewound(p_group, p_head, v_want, p_look - looked, p_worker, p_now);
                v_want := v_want * 4 + 16;
            END IF;
            v_returned := custody.take_returned(p_group, p_head, v_live.held, p_max, p_now);
            -- if all of it was passed over or parked, there may be more to look at behind it
            EXIT WHEN NOT v_bound OR v_returned.taken > 0 OR looked >= p_look OR NOT EXISTS (
                SELECT FROM custody.returned WHERE group_id = v_at.group_id AND partition = v_at.partition AND rewound);
        END LOOP;
        v_odd.returned := v_ordered AND EXISTS (
            SELECT FROM custody.returned WHERE group_id = v_at.group_id AND partition = v_at.partition);
    END IF;
    IF NOT v_returned.chunked AND NOT v_odd.returned AND v_returned.taken < p_max THEN
        v_retries := p_max - v_returned.taken;
        IF v_tail > v_at.frontier THEN
            v_retries := greatest(1, v_retries / 2);
        END IF;
        IF v_odd.hints THEN
            v_ready := custody.wake(p_group, p_head, v_live.held, p_now);
        END IF;
        IF v_odd.next_due <= least(p_now, p_due) OR v_odd.hints THEN
            v_due := custody.take_due(p_group, p_head, v_live.held,
                                      CASE WHEN cardinality(v_ready) > 0 THEN greatest(1, v_retries / 2) ELSE v_retries END,
                                      v_returned.taken > 0, p_worker, p_now, least(p_now, p_due));
        END IF;
        IF NOT (v_due.capped AND cardinality(v_due.taken) > 0) THEN
            IF v_fair THEN
                NULL;       -- what is parked takes its turn with what is fresh
            ELSIF cardinality(v_ready) > 0 AND v_retries > cardinality(v_due.taken) THEN
                v_fresh.taken := custody.take_parked(p_group, v_at.partition, v_ready, v_retries - cardinality(v_due.taken));
            END IF;
            v_retries := v_returned.taken + cardinality(v_due.taken) + custody.cardinality(v_fresh.taken);
            IF (v_tail > v_at.frontier OR v_fair AND cardinality(v_ready) > 0) AND v_retries < p_max THEN
                -- without caps, or with fewer messages in flight than any cap and nothing waiting, there is nothing to count
                IF (p_group).max_in_flight IS NOT NULL OR (p_group).max_parked IS NOT NULL
                    OR v_odd.next_due IS NOT NULL OR v_odd.returned OR v_live.messages + v_retries >= (p_group).max_ack_holes
                THEN
                    v_all := coalesce(v_live.held, '{}');
                    IF v_retries > 0 THEN
                        SELECT v_all + v_fresh.taken + custody.offsets_set(v_due.taken) + coalesce(range_agg(r.held), '{}')
                        INTO v_all FROM unnest(v_returned.parts) r;
                    END IF;
                    reason := coalesce(custody.cap_reached(p_group, v_at, v_all, v_live.messages + v_retries), 'empty');
                END IF;
                IF v_fair AND reason <> 'max_in_flight' THEN
                    v_fresh := custody.take_fairly(p_group, p_head, v_live.held, v_ready, v_at, CASE WHEN reason IN ('empty', 'max_parked') THEN v_tail END,
                        least(p_max - v_retries, (p_group).max_in_flight - v_live.messages - v_retries)::int, p_now);
                ELSIF reason <> 'empty' THEN
                    NULL;
                ELSIF v_bound THEN
                    SELECT v_fresh.taken + f.taken AS taken, f.frontier AS frontier INTO v_fresh
                    FROM custody.take_bound(p_group, p_head, v_live.held, v_at.frontier, v_tail,
                                            least(p_max - v_retries, (p_group).max_in_flight - v_live.messages - v_retries)::int,
                                            p_look - looked,
                                            v_odd.blocking OR v_ordered AND (v_returned.taken > 0 OR cardinality(v_due.taken) > 0),
                                            p_worker, p_now) f;
                    looked := looked + v_fresh.frontier - v_at.frontier;
                ELSIF v_odd.blocking OR v_returned.taken > 0 AND v_ordered OR cardinality(v_due.taken) > 0 AND v_ordered THEN
                    SELECT v_fresh.taken + f.taken AS taken, f.frontier AS frontier INTO v_fresh
                    FROM custody.take_fresh(p_group, p_head, v_live.held, v_at.frontier, v_tail,
                                            least(p_max - v_retries, (p_group).max_in_flight - v_live.messages - v_retries)::int, p_now) f;
                ELSE
                    v_fresh.frontier := least(v_tail, v_at.frontier
                        + least(p_max - v_retries, (p_group).max_in_flight - v_live.messages - v_retries));
                    v_fresh.taken := v_fresh.taken + int8multirange(int8range(v_at.frontier, v_fresh.frontier));
                END IF;
            END IF;
        END IF;
    END IF;

    v_all := v_fresh.taken + custody.offsets_set(v_due.taken);
    IF v_returned.taken > 0 THEN
        SELECT v_all + range_agg(r.held) INTO v_all FROM unnest(v_returned.parts) r;
    END IF;
    IF isempty(v_all) AND v_fresh.frontier = v_at.frontier THEN
        IF v_bound AND looked >= p_look THEN
            reason := 'passed';
        END IF;
        RETURN;
    END IF;
    lease.claim_no := v_at.claim_no + 1;
    v_oldest := coalesce(v_live.oldest, lease.claim_no);
    INSERT INTO custody.frontiers VALUES (v_at.group_id, v_at.partition, lease.claim_no, v_fresh.frontier, v_oldest);
    DELETE FROM custody.frontiers WHERE group_id = v_at.group_id AND partition = v_at.partition AND claim_no = v_at.claim_no;
    IF isempty(v_all) THEN
        -- messages were parked on the way, or passed over: there may be more to find behind them
        reason := CASE WHEN NOT v_bound THEN 'busy' WHEN v_fresh.frontier < v_tail THEN 'passed' ELSE 'empty' END;
        RETURN;
    END IF;

    lease.lease_id := gen_random_uuid();
    lease.partition := v_at.partition;
    lease.deadline := p_now + p_visibility;
    lease.size := custody.cardinality(v_all);
    IF NOT isempty(v_fresh.taken) THEN
        INSERT INTO custody.leases (group_id, partition, claim_no, part, lease_id, held, remaining, of_cases, attempt, size, deadline, claimed_at, worker, fresh)
        VALUES (v_at.group_id, v_at.partition, lease.claim_no, 0, lease.lease_id, v_fresh.taken, custody.cardinality(v_fresh.taken), false, 1,
                lease.size, lease.deadline, p_now, p_worker, true);
        parts := 1;
    END IF;
    IF v_fresh.taken <> v_all THEN
        INSERT INTO custody.leases
        SELECT v_at.group_id, v_at.partition, lease.claim_no, p.part, lease.lease_id, p.held, custody.cardinality(p.held), p.of_cases,
               p.attempt, lease.size, lease.deadline, p_now, p_worker, p.first_delivery, p.last_error
        FROM (
            SELECT r.part, r.held, false AS of_cases, r.attempt, r.first_delivery, r.last_error FROM unnest(v_returned.parts) r
            UNION ALL
            SELECT cardinality(v_returned.parts) + 1, custody.offsets_set(v_due.taken), true, 0, NULL, NULL
        ) p
        WHERE NOT isempty(p.held);
        parts := parts + cardinality(v_returned.parts) + (cardinality(v_due.taken) > 0)::int;
    END IF;
    INSERT INTO custody.journal (at, kind, group_id, partition, lease_id, offsets, worker)
    VALUES (p_now, 'claim', v_at.group_id, v_at.partition, lease.lease_id, v_all, p_worker);
    lease.held := v_all;
    reason := NULL;
END $$;

-- The reason why no fresh message may be handed out, or null. Caps hold for each group and partition. p_in_flight is what
-- is leased and what this claim has taken so far.
CREATE FUNCTION custody.cap_reached(p_group custody.groups, p_at custody.frontiers, p_in_flight int8multirange, p_messages bigint) RETURNS text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_messages >= (p_group).max_in_flight THEN
        RETURN 'max_in_flight';
    END IF;
    -- the count of waiting cases bounds the holes from above and stops at the cap; the exact number is worked out only beyond it
    IF (p_group).max_ack_holes IS NOT NULL AND (p_group).max_ack_holes <= (
        SELECT count(*) FROM (
            SELECT FROM custody.cases WHERE group_id = p_at.group_id AND partition = p_at.partition AND state = 'waiting'
            LIMIT (p_group).max_ack_holes) w) + (SELECT count(*) FROM unnest(p_in_flight))
        AND custody.ack_holes(p_at, p_in_flight) >= (p_group).max_ack_holes
    THEN
        RETURN 'ack_hole_cap_exceeded';
    END IF;
    IF (p_group).max_parked IS NOT NULL
        AND (p_group).max_parked <= (
            SELECT coalesce(sum(messages), 0) FROM custody.parked WHERE group_id = p_at.group_id AND partition = p_at.partition
        ) + (
            SELECT count(*) FROM custody.cases WHERE group_id = p_at.group_id AND partition = p_at.partition AND state = 'parked')
    THEN
        RETURN 'max_parked';
    END IF;
    RETURN NULL;
END $$;

-- Behind which key most messages wait.
CREATE FUNCTION custody.most_parked(p_group_id int) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('%s messages wait behind key %L of partition %s', sum(messages), key, partition)
    FROM (
        SELECT partition, key, messages FROM custody.parked WHERE group_id = p_group_id
        UNION ALL
        SELECT partition, key, 1 FROM custody.cases WHERE group_id = p_group_id AND state = 'parked') p
    GROUP BY partition, key ORDER BY sum(messages) DESC, partition, key LIMIT 1
$$;

-- The partitions of a group that have something to give, in random order; those that only wait for a live lease last.
CREATE FUNCTION custody.claim_candidates(p_group custody.groups, p_now timestamptz) RETURNS int[]
LANGUAGE sql VOLATILE AS $$
    SELECT array_agg(x.partition ORDER BY x.certain DESC, random())
    FROM (
        SELECT c.partition,
               t.next_offset > f.frontier
               OR h.delayed_from IS NOT NULL AND coalesce(custody.next_delivery(h) <= p_now, false)
               OR EXISTS (SELECT FROM custody.returned r WHERE r.group_id = c.group_id AND r.partition = c.partition)
               OR coalesce((SELECT min(s.run_at) FROM custody.cases s WHERE s.group_id = c.group_id AND s.partition = c.partition
                            AND s.state = 'waiting') <= p_now, false)
               OR EXISTS (SELECT FROM custody.freed d WHERE d.group_id = c.group_id AND d.partition = c.partition)
               OR EXISTS (SELECT FROM custody.leases l WHERE l.group_id = c.group_id AND l.partition = c.partition
                          AND l.claim_no >= f.oldest_claim AND l.deadline <= p_now)
               OR EXISTS (SELECT FROM custody.outbox o WHERE o.topic_id = h.topic_id AND o.partition = h.partition AND o.ended_at IS NULL
                          AND o.available_at <= p_now) AS certain,
               EXISTS (SELECT FROM custody.awaited a WHERE a.group_id = c.group_id AND a.partition = c.partition) AS possible
        FROM custody.cursors c
        JOIN custody.heads h ON h.topic_id = (p_group).topic_id AND h.partition = c.partition
        CROSS JOIN LATERAL custody.tail(h) t
        CROSS JOIN LATERAL custody.position(c.group_id, c.partition) f
        WHERE c.group_id = (p_group).group_id
    ) x
    WHERE x.certain OR x.possible
$$;

-- Waits a little for a cursor. True if it is locked now; the setting of the caller's own waits stays as it is.
CREATE FUNCTION custody.await_cursor(p_group_id int, p_partition int) RETURNS boolean
LANGUAGE plpgsql SET lock_timeout = '250ms' AS $$
BEGIN
    PERFORM 1 FROM custody.cursors WHERE group_id = p_group_id AND partition = p_partition FOR UPDATE;
    RETURN FOUND;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;

-- The first row describes the lease (or, without a lease_id, the reason why there is none: empty, busy, paused,
-- breaker_open or the cap that was reached), and has the priority in place of a key; the rows after it are its messages, by
-- offset. A claim of a bound group looks at 10,000 messages at most, or as many as it wants if that is more. If none of them
-- could be handed out and there are more, it is busy and says so in `last_error`: claim again at once.
CREATE FUNCTION custody.claim(
    p_topic text, p_group text, p_max int DEFAULT 1, p_visibility interval DEFAULT NULL, p_worker text DEFAULT NULL,
    p_partition int DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (
    lease_id uuid, partition int, deadline timestamptz, reason text,
    "offset" bigint, published_at timestamptz, key text, kind "char", payload bytea, headers jsonb,
    attempt int, first_delivery timestamptz, last_error text
)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_group      custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_topic      custody.topics;
    v_head       custody.heads;
    v_candidates int[];
    v_partition  int;
    v_tried      boolean := false;
    v_claim      record;
    v_reason     text := 'empty';
    v_died       custody.death[];
    v_binding    int;
    v_look       bigint := greatest(10000, p_max);
    v_passed     boolean := false;
BEGIN
    PERFORM custody.require_read_committed();
    SELECT NULL::custody.leases AS lease, 0 AS parts, 'empty' AS reason INTO v_claim;
    IF p_max IS NULL OR p_max < 1 THEN
        PERFORM custody.refuse('invalid_argument', 'max_messages must be at least 1');
    ELSIF p_visibility <= '0' THEN
        PERFORM custody.refuse('invalid_argument', 'the visibility timeout must be positive');
    END IF;
    IF v_group.paused_at IS NOT NULL THEN
        RETURN QUERY SELECT NULL::uuid, NULL::int, NULL::timestamptz, 'paused', NULL::bigint, NULL::timestamptz, NULL::text, NULL::"char",
                            NULL::bytea, NULL::jsonb, NULL::int, NULL::timestamptz, v_group.paused_reason;
        RETURN;
    END IF;
    IF v_group.breaker_state <> 'closed' THEN
        p_max := custody.breaker_allows(v_group.group_id, p_max, coalesce(p_now, clock_timestamp()));
        IF p_max = 0 THEN
            RETURN QUERY SELECT NULL::uuid, NULL::int, NULL::timestamptz, 'breaker_open', NULL::bigint, NULL::timestamptz, NULL::text,
                                NULL::"char", NULL::bytea, NULL::jsonb, NULL::int, NULL::timestamptz, v_group.breaker_reason;
            RETURN;
        END IF;
    END IF;
    SELECT t.* INTO v_topic FROM custody.topics t WHERE t.topic_id = v_group.topic_id;
    IF p_partition IS NOT NULL THEN
        PERFORM custody.require_partition(v_topic, p_partition);
        v_candidates := ARRAY[p_partition];
    ELSIF v_topic.partitions = 1 THEN
        v_candidates := ARRAY[0];
    ELSE
        BEGIN
            IF v_topic.starvation_limit IS NULL THEN
                v_candidates := custody.claim_candidates(v_group, coalesce(p_now, clock_timestamp()));
            ELSE
                v_candidates := custody.candidates_by_priority(v_group, v_topic.starvation_limit, coalesce(p_now, clock_timestamp()));
            END IF;
            v_candidates := coalesce(v_candidates, '{}');
        EXCEPTION WHEN undefined_table THEN
            v_candidates := '{}';       -- the segment it looked into was dropped meanwhile
            v_reason := 'busy';
        END;
    END IF;

    -- once over all candidates without waiting; if each of them was locked, wait a little for the first
    FOR v_round IN 1..2 LOOP
        FOREACH v_partition IN ARRAY v_candidates LOOP
            IF v_round = 1 THEN
                SELECT c.binding_no INTO v_binding FROM custody.cursors c
                WHERE c.group_id = v_group.group_id AND c.partition = v_partition FOR UPDATE SKIP LOCKED;
            ELSE
                v_binding := NULL;
                PERFORM WHERE custody.await_cursor(v_group.group_id, v_partition);
            END IF;
            IF NOT FOUND THEN
                v_reason := 'busy';
                EXIT WHEN v_round = 2;
                CONTINUE;
            END IF;
            v_tried := true;
            IF v_binding IS DISTINCT FROM v_group.binding_no THEN      -- the group may have been bound anew since it was read
                SELECT g.matcher, g.binding_no, g.fairness INTO v_group.matcher, v_group.binding_no, v_group.fairness
                FROM custody.groups g WHERE g.group_id = v_group.group_id;
            END IF;
            SELECT h.* INTO v_head FROM custody.heads h WHERE h.topic_id = v_group.topic_id AND h.partition = v_partition;
            IF v_head.delayed_from IS NOT NULL THEN
                v_head := custody.deliver_due(v_head, coalesce(p_now, clock_timestamp()));
            END IF;
            v_claim := custody.claim_partition(v_group, v_head, p_max, coalesce(p_visibility, v_group.visibility_timeout), p_worker,
                                               coalesce(p_now, clock_timestamp()), p_look => v_look);
            IF v_claim.died IS NOT NULL THEN
                v_died := v_died || v_claim.died;
            END IF;
            EXIT WHEN v_claim.reason IS NULL;
            IF v_claim.reason <> 'empty' THEN
                v_reason := v_claim.reason;
            END IF;
            v_look := v_look - v_claim.looked;
            v_passed := v_passed OR v_reason = 'passed' OR v_look <= 0;
            EXIT WHEN v_round = 2 OR v_look <= 0;
        END LOOP;
        EXIT WHEN v_tried OR cardinality(v_candidates) = 0;
    END LOOP;

    IF v_died IS NOT NULL THEN
        PERFORM custody.copy_dead(v_group, v_died, p_now);
    END IF;
    IF v_claim.reason IS NOT NULL THEN
        IF v_passed THEN
            v_reason := 'busy';
        END IF;
        RETURN QUERY SELECT NULL::uuid, NULL::int, NULL::timestamptz, v_reason, NULL::bigint, NULL::timestamptz, NULL::text, NULL::"char",
                            NULL::bytea, NULL::jsonb, NULL::int, NULL::timestamptz,
                            CASE WHEN v_reason = 'max_parked' THEN custody.most_parked(v_group.group_id)
                                 WHEN v_passed THEN 'what it has looked at is not bound: there is more' END;
        RETURN;
    END IF;
    IF v_group.breaker_state <> 'closed' THEN
        PERFORM custody.breaker_probes(v_group.group_id, (v_claim.lease).lease_id, (v_claim.lease).deadline);
    END IF;
    RETURN QUERY SELECT (v_claim.lease).lease_id, v_partition, (v_claim.lease).deadline, NULL::text, NULL::bigint, NULL::timestamptz,
                        CASE WHEN v_topic.starvation_limit IS NOT NULL THEN custody.lane(v_partition) END, NULL::"char", NULL::bytea, NULL::jsonb, NULL::int, NULL::timestamptz, NULL::text;
    IF v_claim.parts = 1 THEN
        RETURN QUERY SELECT * FROM custody.leased_messages(v_group.group_id, v_head, (v_claim.lease).claim_no);
    ELSE
        RETURN QUERY SELECT * FROM custody.leased_messages(v_group.group_id, v_head, (v_claim.lease).claim_no) m ORDER BY m."offset";
    END IF;
END $$;
