-- Claiming from one partition: what came back, what is due, what is fresh, up to the caps.

-- What one partition has to give, if wanted only of what is below p_until and of the retries that were due at p_due.
-- The caller holds its cursor, and copies what has died by it when it needs no other lock. Of a bound group at most
-- p_look messages are looked at, and none long after p_stop; the reason is `passed` if none of those could be handed
-- out, and there may be more to find behind them. Nothing is matched under a head, which publishers wait for: a claim
-- that has delivered looks at nothing. What came back, retries, parked and fresh messages take turns by the number of
-- the claim where a lease cannot have a part of each: what came back has two of four claims, of the others retries and
-- fresh messages every second one, and of the retries due and parked ones. Every second claim begins with what came
-- back first, and the others with what is first in the log (but for groups that are both ordered and bound). `died` and
-- `heads_held` (this transaction may hold heads) go from one call to the next: who waits for the heads of copies must
-- hold no other, since publishers take theirs in one order. So after a death nothing is delivered into the partition,
-- and while heads are held, leases of which a message could die and be copied are left to a later claim.
CREATE FUNCTION custody.claim_partition(
    p_group custody.groups, INOUT head custody.heads, p_max int, p_visibility interval, p_worker text,
    p_now timestamptz, p_until bigint, p_due timestamptz, p_look bigint, p_stop timestamptz,
    INOUT heads_held boolean DEFAULT false, INOUT died custody.death[] DEFAULT NULL,
    OUT lease custody.leases, OUT parts int, OUT reason text, OUT looked bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    -- beyond this many messages in flight an ordered partition belongs to those who hold them
    v_exclusive  constant int := 10000;
    v_ordered    boolean := (p_group).ordering = 'key';
    v_fair       boolean := (p_group).fairness IS NOT NULL;
    v_bound      boolean := (p_group).matcher IS NOT NULL;
    v_at         custody.frontiers := custody.position((p_group).group_id, head.partition);
    v_live       record;
    v_outbox     boolean;
    v_delayed    boolean;
    v_exceptions record;
    v_returned   record;
    v_due        record;
    v_tail       bigint;
    v_fresh      record;
    v_ready      text[] := '{}';
    v_want       bigint;
    v_retries    int;
    v_held       int8multirange;         -- in flight, or to be treated so
    v_back       record;
    v_waiting    boolean;
    v_turns      boolean := true;
    -- what a rewind brought back may block keys without being bound: there the order of the log is kept
    v_oldest_row boolean := v_at.claim_no % 2 = 1 AND NOT (v_ordered AND v_bound);
    v_left       boolean := false;       -- what came back has to wait for this claim
    v_had_left   boolean := false;       -- and then nothing else was found, so it did not
    v_share      boolean := false;
    v_late       boolean := false;
    v_turn       custody.frontiers;
    v_room       bigint;
    v_oldest     bigint;
    v_all        int8multirange;
    v_entry      bigint;
BEGIN
    parts := 0;
    reason := 'empty';
    looked := 0;
    SELECT l.*, EXISTS (SELECT FROM custody.outbox o WHERE o.topic_id = head.topic_id AND o.partition = head.partition
                        AND o.ended_at IS NULL AND o.available_at <= p_now) AS outbox
    INTO v_live FROM custody.live_leases(v_at.group_id, v_at.partition, v_at.oldest_claim, p_now) l;
    v_outbox := v_live.outbox;
    IF v_live.expired THEN
        died := died || custody.fold_expired(p_group, head, v_at.oldest_claim, p_now, p_copied => NOT heads_held);
        SELECT l.* INTO v_live FROM custody.live_leases(v_at.group_id, v_at.partition, v_at.oldest_claim, p_now) l;
    END IF;
    v_delayed := head.delayed_from IS NOT NULL AND coalesce(custody.next_delivery(head) <= p_now, false);
    IF died IS NULL AND (v_delayed OR v_outbox) THEN
        heads_held := true;
        IF v_delayed THEN
            head := custody.deliver_due(head, p_now);
        END IF;
        IF v_outbox THEN
            PERFORM custody.take_outbox(head, p_now);
        END IF;
        IF v_bound THEN
            looked := p_look;
            reason := 'passed';
            RETURN;
        END IF;
    END IF;
    v_tail := least((custody.tail(head)).next_offset, p_until);
    IF v_ordered AND v_live.messages > v_exclusive THEN
        reason := 'busy';
        RETURN;
    END IF;

    -- min() walks to the first entry of an index; EXISTS makes a generic plan bet on a sequential scan to find one soon
    SELECT EXISTS (SELECT FROM custody.returned
                   WHERE group_id = v_at.group_id AND partition = v_at.partition) AS returned,
           (SELECT min(run_at) FROM custody.cases WHERE group_id = v_at.group_id AND partition = v_at.partition
            AND state = 'waiting') AS next_due,
           v_ordered AND (
               EXISTS (SELECT FROM custody.freed WHERE group_id = v_at.group_id AND partition = v_at.partition)
               OR EXISTS (SELECT FROM custody.awaited
                          WHERE group_id = v_at.group_id AND partition = v_at.partition)) AS hints,
           v_ordered AND (
               v_live.held IS NOT NULL
               OR EXISTS (SELECT FROM custody.parked WHERE group_id = v_at.group_id AND partition = v_at.partition)
               OR (SELECT min(key) FROM custody.cases WHERE group_id = v_at.group_id AND partition = v_at.partition
                   AND key IS NOT NULL AND (state <> 'dead' OR held)) IS NOT NULL) AS blocking
    INTO v_exceptions;

    SELECT '{}'::int8multirange AS taken, v_at.frontier AS frontier INTO v_fresh;
    SELECT '{}'::custody.leases[] AS parts, 0 AS taken, false AS chunked INTO v_returned;
    SELECT '{}'::bigint[] AS taken, false AS capped INTO v_due;
    v_waiting := v_exceptions.hints OR coalesce(v_exceptions.next_due <= least(p_now, p_due), false);
    v_held := v_live.held;
    IF v_exceptions.returned AND v_at.claim_no / 2 % 2 = 1 AND (v_waiting OR v_tail > v_at.frontier) THEN
        SELECT custody.cardinality(range_agg(r.ranges)) AS messages, range_agg(r.ranges) AS ranges,
               bool_or(r.chunk IS NOT NULL) AS chunked
        INTO v_back FROM custody.returned r WHERE r.group_id = v_at.group_id AND r.partition = v_at.partition;
        -- what has a chunk comes to an end by itself; and in an ordered group leaving it costs rows for what is behind
        -- its keys
        v_left := v_back.messages >= p_max AND NOT v_back.chunked AND (NOT v_ordered OR v_back.messages <= 100);
        IF v_left AND v_ordered THEN
            v_held := coalesce(v_held, '{}') + v_back.ranges;       -- it blocks its keys, as if it were in flight
            v_exceptions.blocking := true;
        END IF;
    END IF;
    LOOP
        IF v_exceptions.returned AND NOT v_left THEN
            v_want := p_max;
            LOOP
                IF v_bound THEN
                    looked := looked + custody.sift_rewound(p_group, head, v_want, v_oldest_row, p_look - looked,
                                                            p_stop, p_worker, p_now);
                    v_want := v_want * 4 + 16;
                END IF;
                v_returned := custody.take_returned(p_group, head, v_held, p_max, v_oldest_row, p_now);
                -- if all of it was passed over or parked, there may be more to look at behind it
                EXIT WHEN NOT v_bound OR v_returned.taken > 0 OR looked >= p_look OR NOT EXISTS (
                    SELECT FROM custody.returned
                    WHERE group_id = v_at.group_id AND partition = v_at.partition AND rewound);
                v_late := clock_timestamp() >= p_stop;
                EXIT WHEN v_late;
            END LOOP;
            v_exceptions.returned := v_ordered AND EXISTS (
                SELECT FROM custody.returned WHERE group_id = v_at.group_id AND partition = v_at.partition);
        END IF;
        IF NOT v_returned.chunked AND (v_left OR NOT v_exceptions.returned) AND v_returned.taken < p_max THEN
            IF v_exceptions.hints AND v_turns THEN
                v_ready := custody.wake(p_group, head, v_held, p_now);
            END IF;
            v_retries := p_max - v_returned.taken;
            v_share := v_turns AND (v_tail > v_at.frontier OR v_fair AND cardinality(v_ready) > 0);
            IF v_share THEN
                v_retries := (v_retries + 1 - v_at.claim_no % 2) / 2;
            END IF;
            IF v_waiting THEN
                v_due := custody.take_due(p_group, head, v_held,
                                          CASE WHEN v_turns AND NOT v_fair AND cardinality(v_ready) > 0
                                               THEN (v_retries + 1 - (v_at.claim_no / 4 % 2)::int) / 2
                                               ELSE v_retries END,
                                          v_returned.taken > 0 OR v_share AND v_at.claim_no % 2 = 1, p_worker, p_now,
                                          least(p_now, p_due));
            END IF;
            IF NOT (v_due.capped AND cardinality(v_due.taken) > 0) THEN
                IF v_fair THEN
                    NULL;       -- what is parked takes its turn with what is fresh
                ELSIF cardinality(v_ready) > 0 AND v_retries > cardinality(v_due.taken) THEN
                    v_fresh.taken := custody.take_parked(p_group, v_at.partition, v_ready,
                                                         v_retries - cardinality(v_due.taken));
                END IF;
                v_retries := v_returned.taken + cardinality(v_due.taken) + custody.cardinality(v_fresh.taken);
                IF (v_tail > v_at.frontier OR v_fair AND cardinality(v_ready) > 0) AND v_retries < p_max
                    AND v_fresh.frontier = v_at.frontier THEN
                    -- without caps, or with fewer messages in flight than any cap and nothing waiting, there is nothing
                    -- to count
                    IF (p_group).max_in_flight IS NOT NULL OR (p_group).max_parked IS NOT NULL
                        OR v_exceptions.next_due IS NOT NULL OR v_exceptions.returned
                        OR v_live.messages + v_retries >= (p_group).max_ack_holes
                    THEN
                        v_all := coalesce(v_live.held, '{}');
                        IF v_retries > 0 THEN
                            SELECT v_all + v_fresh.taken + custody.offsets_set(v_due.taken)
                                + coalesce(range_agg(r.held), '{}')
                            INTO v_all FROM unnest(v_returned.parts) r;
                        END IF;
                        reason := coalesce(custody.cap_reached(p_group, v_at, v_all, v_live.messages + v_retries),
                                           'empty');
                    END IF;
                    v_room := least(p_max, (p_group).max_in_flight - v_live.messages) - v_retries;
                    IF v_fair AND reason <> 'max_in_flight' THEN
                        v_turn := v_at;
                        v_turn.claim_no := v_at.claim_no / CASE WHEN v_left THEN 4
                                                                WHEN v_exceptions.next_due <= least(p_now, p_due) THEN 2
                                                                ELSE 1 END;
                        v_fresh := custody.take_fairly(p_group, head, v_held, v_ready, v_turn,
                                                       CASE WHEN reason IN ('empty', 'max_parked') THEN v_tail END,
                                                       v_room::int, p_now);
                    ELSIF reason <> 'empty' THEN
                        NULL;
                    ELSIF v_bound THEN
                        SELECT v_fresh.taken + f.taken AS taken, f.frontier AS frontier INTO v_fresh
                        FROM custody.take_bound(p_group, head, v_held, v_at.frontier, v_tail, v_room::int,
                                                p_look - looked, p_stop, v_exceptions.blocking
                                                OR v_ordered AND (v_returned.taken > 0 OR cardinality(v_due.taken) > 0),
                                                p_worker, p_now) f;
                        looked := looked + v_fresh.frontier - v_at.frontier;
                    ELSIF v_exceptions.blocking OR v_returned.taken > 0 AND v_ordered
                        OR cardinality(v_due.taken) > 0 AND v_ordered THEN
                        SELECT v_fresh.taken + f.taken AS taken, f.frontier AS frontier INTO v_fresh
                        FROM custody.take_fresh(p_group, head, v_held, v_at.frontier, v_tail, v_room::int, p_now) f;
                    ELSE
                        v_fresh.frontier := least(v_tail, v_at.frontier + v_room);
                        v_fresh.taken := v_fresh.taken + int8multirange(int8range(v_at.frontier, v_fresh.frontier));
                    END IF;
                END IF;
            END IF;
        END IF;
        -- those whose turn it is may have nothing to give: then the others have theirs
        EXIT WHEN NOT v_turns OR v_returned.taken > 0 OR cardinality(v_due.taken) > 0 OR NOT isempty(v_fresh.taken)
            OR NOT (v_left OR v_waiting AND v_share);
        v_turns := false;
        v_had_left := v_left;
        v_left := false;
        v_held := v_live.held;
        reason := 'empty';
    END LOOP;

    v_all := v_fresh.taken + custody.offsets_set(v_due.taken);
    IF v_returned.taken > 0 THEN
        SELECT v_all + range_agg(r.held) INTO v_all FROM unnest(v_returned.parts) r;
    END IF;
    IF isempty(v_all) AND v_fresh.frontier = v_at.frontier THEN
        IF v_bound AND (looked >= p_look OR v_late) THEN
            reason := 'passed';
        ELSIF died IS NOT NULL AND (v_delayed OR v_outbox) THEN
            reason := 'busy';       -- there is more to deliver: the next claim finds it
        ELSIF v_had_left AND v_ordered AND reason = 'empty' THEN
            -- what was parked behind it may be free, now that it was passed over: the next claim wakes it
            reason := 'busy';
        END IF;
        RETURN;
    END IF;
    lease.claim_no := v_at.claim_no + 1;
    v_oldest := coalesce(v_live.oldest, lease.claim_no);
    INSERT INTO custody.frontiers VALUES (v_at.group_id, v_at.partition, lease.claim_no, v_fresh.frontier, v_oldest);
    DELETE FROM custody.frontiers
    WHERE group_id = v_at.group_id AND partition = v_at.partition AND claim_no = v_at.claim_no;
    IF isempty(v_all) THEN
        -- messages were parked on the way, or passed over: there may be more to find behind them
        reason := CASE WHEN NOT v_bound THEN 'busy' WHEN v_fresh.frontier < v_tail THEN 'passed' ELSE 'empty' END;
        RETURN;
    END IF;

    v_entry := nextval('custody.journal_entries');
    lease.lease_id := custody.lease_id_of(v_entry);
    lease.partition := v_at.partition;
    lease.deadline := p_now + p_visibility;
    lease.size := custody.cardinality(v_all);
    IF NOT isempty(v_fresh.taken) THEN
        INSERT INTO custody.leases (group_id, partition, claim_no, part, lease_id, held, remaining, of_cases, attempt,
                                    size, deadline, claimed_at, worker)
        VALUES (v_at.group_id, v_at.partition, lease.claim_no, 0, lease.lease_id, v_fresh.taken,
                custody.cardinality(v_fresh.taken), false, 1, lease.size, lease.deadline, p_now, p_worker);
        parts := 1;
    END IF;
    IF v_fresh.taken <> v_all THEN
        INSERT INTO custody.leases (group_id, partition, claim_no, part, lease_id, held, remaining, of_cases, attempt,
                                    size, deadline, claimed_at, worker, first_delivery, last_error)
        SELECT v_at.group_id, v_at.partition, lease.claim_no, p.part, lease.lease_id, p.held,
               custody.cardinality(p.held), p.of_cases, p.attempt, lease.size, lease.deadline, p_now, p_worker,
               p.first_delivery, p.last_error
        FROM (
            SELECT r.part, r.held, false AS of_cases, r.attempt, r.first_delivery, r.last_error
            FROM unnest(v_returned.parts) r
            UNION ALL
            SELECT cardinality(v_returned.parts) + 1, custody.offsets_set(v_due.taken), true, 0, NULL, NULL
        ) p
        WHERE NOT isempty(p.held);
        parts := parts + cardinality(v_returned.parts) + (cardinality(v_due.taken) > 0)::int;
    END IF;
    INSERT INTO custody.journal (entry, at, kind, group_id, partition, lease_id, offsets, worker)
    VALUES (v_entry, p_now, 'claim', v_at.group_id, v_at.partition, lease.lease_id, v_all, p_worker);
    lease.held := v_all;
    reason := NULL;
END $$;

-- What is in flight of a partition, from its oldest claim that is not settled on, and whether any of it has expired.
CREATE FUNCTION custody.live_leases(p_group_id int, p_partition int, p_oldest bigint, p_now timestamptz)
RETURNS TABLE (held int8multirange, messages bigint, oldest bigint, expired boolean)
LANGUAGE sql STABLE AS $$
    SELECT range_agg(l.held), coalesce(sum(l.remaining), 0), min(l.claim_no), bool_or(l.deadline <= p_now)
    FROM custody.leases l
    WHERE l.group_id = p_group_id AND l.partition = p_partition AND l.claim_no >= p_oldest
$$;

-- The reason why no fresh message may be handed out, or null. Caps hold for each group and partition. p_in_flight is
-- what is leased and what this claim has taken so far.
CREATE FUNCTION custody.cap_reached(
    p_group custody.groups, p_at custody.frontiers, p_in_flight int8multirange, p_messages bigint
)
RETURNS text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_messages >= (p_group).max_in_flight THEN
        RETURN 'max_in_flight';
    END IF;
    -- the count of waiting cases bounds the holes from above and stops at the cap; the exact number is worked out only
    -- beyond it
    IF (p_group).max_ack_holes IS NOT NULL AND (p_group).max_ack_holes <= (
        SELECT count(*) FROM (
            SELECT FROM custody.cases
            WHERE group_id = p_at.group_id AND partition = p_at.partition AND state = 'waiting'
            LIMIT (p_group).max_ack_holes) w) + (SELECT count(*) FROM unnest(p_in_flight))
        AND custody.ack_holes(p_at, p_in_flight) >= (p_group).max_ack_holes
    THEN
        RETURN 'ack_hole_cap_exceeded';
    END IF;
    IF (p_group).max_parked IS NOT NULL
        AND (p_group).max_parked <= (
            SELECT coalesce(sum(messages), 0) FROM custody.parked
            WHERE group_id = p_at.group_id AND partition = p_at.partition
        ) + (
            SELECT count(*) FROM custody.cases
            WHERE group_id = p_at.group_id AND partition = p_at.partition AND state = 'parked')
    THEN
        RETURN 'max_parked';
    END IF;
    RETURN NULL;
END $$;
