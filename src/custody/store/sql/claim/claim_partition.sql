-- Claiming from one partition: expire, deliver, look, take, write the lease.

-- Claims up to p_max messages of one partition. The caller holds its cursor. Either `reason` is null, and `lease` and
-- its `parts` are what was claimed, or `reason` says why nothing was: empty, busy, passed or the cap that was reached.
-- `fresh` is all of the lease, if that is one range of fresh messages; otherwise it is null.
--
-- A pipeline also gives p_until and p_due: only messages below that offset, and retries that were due at that time.
--
-- Of a bound group at most p_look messages are matched, and none long after p_stop. `looked` is their number. The
-- reason is `passed` if none of them could be handed out and there may be more behind them.
--
-- `heads_held` and `died` go from one call of a transaction to the next. The caller copies the messages of `died` into
-- the dead-letter topic, and waits for its heads. It must hold no other head then, because publishers take theirs in
-- one order. So after a death nothing is delivered into the log; and while heads are held, expired leases whose
-- messages could die are left to a later claim.
CREATE FUNCTION custody.claim_partition(
    p_group custody.groups, INOUT head custody.heads, p_max int, p_visibility interval, p_worker text,
    p_now timestamptz, p_until bigint, p_due timestamptz, p_look bigint, p_stop timestamptz,
    INOUT heads_held boolean DEFAULT false, INOUT died custody.death[] DEFAULT NULL,
    OUT lease custody.leases, OUT parts int, OUT fresh int8range, OUT reason text, OUT looked bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    c_exclusive constant int := 10000;     -- with more in flight an ordered partition belongs to their holders
    v_ahead     constant bigint := 2 * p_max::bigint + 16;     -- blocked messages do not count
    v_at        constant custody.frontiers := custody.position((p_group).group_id, head.partition);
    v_live      record;
    v_delayed   boolean;
    v_has       custody.claimable;
    v_seen      bigint := v_at.seen;
    v_frontier  bigint;
    v_fresh     int8multirange;
    v_taken     record;
BEGIN
    parts := 0;
    looked := 0;

    -- Expire: fold the leases whose deadline has passed.
    SELECT l.*, EXISTS (SELECT FROM custody.outbox o WHERE o.topic_id = head.topic_id AND o.partition = head.partition
                        AND o.ended_at IS NULL AND o.available_at <= p_now) AS outbox
    INTO v_live FROM custody.live_leases(v_at.group_id, v_at.partition, v_at.oldest_claim, p_now) l;
    IF v_live.expired THEN
        died := died || custody.fold_expired(p_group, head, v_at.oldest_claim, p_now, p_copied => NOT heads_held);
        SELECT l.*, v_live.outbox AS outbox INTO v_live
        FROM custody.live_leases(v_at.group_id, v_at.partition, v_at.oldest_claim, p_now) l;
    END IF;

    -- Deliver: append delayed messages and events of the outbox that are due.
    v_delayed := head.delayed_from IS NOT NULL AND coalesce(custody.next_delivery(head) <= p_now, false);
    IF died IS NULL AND (v_delayed OR v_live.outbox) THEN
        heads_held := true;
        IF v_delayed THEN
            head := custody.deliver_due(head, p_now);
        END IF;
        IF v_live.outbox THEN
            PERFORM custody.take_outbox(head, p_now);
        END IF;
        IF (p_group).matcher IS NOT NULL THEN
            looked := p_look;
            reason := 'passed';     -- nothing is matched while the head is locked: publishers wait for it
            RETURN;
        END IF;
    END IF;

    -- Look: what does the partition have?
    IF (p_group).ordering = 'key' AND v_live.messages > c_exclusive THEN
        reason := 'busy';
        RETURN;
    END IF;
    SELECT v_live.held, v_live.messages, NULL::bigint, e.* INTO v_has
    FROM custody.exceptions(v_at.group_id, v_at.partition, (p_group).ordering = 'key', v_live.held) e;

    -- Take: only fresh messages, if there are no others and no caps. If no key is blocked they are a range, and no key
    -- is read. Nor is the end of the log in any case, if the last look at it was far enough ahead.
    IF v_has.returned OR v_has.next_due IS NOT NULL OR v_has.hints
        OR (p_group).fairness IS NOT NULL OR (p_group).matcher IS NOT NULL OR (p_group).max_in_flight IS NOT NULL
        OR (p_group).max_parked IS NOT NULL OR v_has.messages >= (p_group).max_ack_holes
    THEN
        IF (p_group).fairness IS NOT NULL OR (p_group).matcher IS NOT NULL OR v_seen < v_at.frontier + v_ahead THEN
            v_seen := (custody.tail(head)).next_offset;
        END IF;
        v_has.tail := least(v_seen, p_until);
        v_taken := custody.take_in_turns(p_group, head, v_at, v_has, p_max, p_worker, p_now, least(p_now, p_due),
                                         p_look, p_stop);
        looked := v_taken.looked;
    ELSE
        IF v_seen < v_at.frontier + (CASE WHEN v_has.blocking THEN v_ahead ELSE p_max END) THEN
            v_seen := (custody.tail(head)).next_offset;
        END IF;
        v_has.tail := least(v_seen, p_until);
        IF v_has.blocking THEN
            SELECT f.taken, f.frontier INTO v_fresh, v_frontier
            FROM custody.take_fresh(p_group, head, v_has.held, v_at.frontier, v_has.tail, p_max, p_now) f;
        ELSE
            v_frontier := greatest(v_at.frontier, least(v_has.tail, v_at.frontier + p_max));
            fresh := int8range(v_at.frontier, v_frontier);
            v_fresh := int8multirange(fresh);
        END IF;
        SELECT v_fresh AS held, '{}'::custody.leases[] AS back, '{}'::bigint[] AS due, v_fresh AS fresh,
               v_frontier AS frontier, 'empty' AS reason INTO v_taken;
    END IF;
    lease.held := v_taken.held;

    -- Write: the new frontier and the lease.
    IF isempty(lease.held) AND v_taken.frontier = v_at.frontier THEN
        -- After a death the next claim delivers what is due.
        reason := CASE WHEN v_taken.reason <> 'passed' AND died IS NOT NULL AND (v_delayed OR v_live.outbox) THEN 'busy'
                       ELSE v_taken.reason END;
        RETURN;
    END IF;
    lease.claim_no := v_at.claim_no + 1;
    INSERT INTO custody.frontiers
    VALUES (v_at.group_id, v_at.partition, lease.claim_no, v_taken.frontier, coalesce(v_live.oldest, lease.claim_no),
            v_seen);
    DELETE FROM custody.frontiers
    WHERE group_id = v_at.group_id AND partition = v_at.partition AND claim_no = v_at.claim_no;
    IF isempty(lease.held) THEN
        -- Messages were parked on the way, or passed over: there may be more behind them.
        reason := CASE WHEN (p_group).matcher IS NULL THEN 'busy' WHEN v_taken.frontier < v_has.tail THEN 'passed'
                       ELSE v_taken.reason END;
        RETURN;
    END IF;
    lease.group_id := v_at.group_id;
    lease.partition := v_at.partition;
    lease.deadline := p_now + p_visibility;
    lease.claimed_at := p_now;
    lease.worker := p_worker;
    lease := custody.write_lease(lease, v_taken.fresh, v_taken.back, v_taken.due);
    parts := (NOT isempty(v_taken.fresh))::int + cardinality(v_taken.back) + (cardinality(v_taken.due) > 0)::int;
END $$;

-- What is in flight of a partition, from its oldest claim that is not settled on, and whether any of it has expired.
CREATE FUNCTION custody.live_leases(p_group_id int, p_partition int, p_oldest bigint, p_now timestamptz)
RETURNS TABLE (held int8multirange, messages bigint, oldest bigint, expired boolean)
LANGUAGE sql STABLE AS $$
    SELECT range_agg(l.held), coalesce(sum(l.remaining), 0), min(l.claim_no), bool_or(l.deadline <= p_now)
    FROM custody.leases l
    WHERE l.group_id = p_group_id AND l.partition = p_partition AND l.claim_no >= p_oldest
$$;

-- What a partition has besides fresh messages: messages that came back; when the next retry is due; hints about keys;
-- and whether a key could be blocked. Where min() stands instead of EXISTS, it reads the first entry of an index: with
-- EXISTS a generic plan expects a sequential scan to find a row soon.
CREATE FUNCTION custody.exceptions(p_group_id int, p_partition int, p_ordered boolean, p_in_flight int8multirange)
RETURNS TABLE (returned boolean, next_due timestamptz, hints boolean, blocking boolean)
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM custody.returned r WHERE r.group_id = p_group_id AND r.partition = p_partition),
           (SELECT min(c.run_at) FROM custody.cases c
            WHERE c.group_id = p_group_id AND c.partition = p_partition AND c.state = 'waiting'),
           p_ordered AND (
               EXISTS (SELECT FROM custody.freed f WHERE f.group_id = p_group_id AND f.partition = p_partition)
               OR EXISTS (SELECT FROM custody.awaited a WHERE a.group_id = p_group_id AND a.partition = p_partition)),
           p_ordered AND (
               p_in_flight IS NOT NULL
               OR EXISTS (SELECT FROM custody.parked p WHERE p.group_id = p_group_id AND p.partition = p_partition)
               OR (SELECT min(c.key) FROM custody.cases c
                   WHERE c.group_id = p_group_id AND c.partition = p_partition
                     AND c.key IS NOT NULL AND (c.state <> 'dead' OR c.held)) IS NOT NULL)
$$;

-- Writes a lease, given with what all its parts have in common: a row for the fresh messages, one for each piece of
-- what came back, one for the retries; and its entry in the journal, whose number is in the lease id.
CREATE FUNCTION custody.write_lease(
    INOUT p_lease custody.leases, p_fresh int8multirange, p_back custody.leases[], p_due bigint[]
)
LANGUAGE plpgsql AS $$
DECLARE
    v_entry constant bigint := nextval('custody.journal_entries');
BEGIN
    p_lease.lease_id := custody.lease_id_of(v_entry);
    p_lease.size := custody.cardinality(p_lease.held);
    IF NOT isempty(p_fresh) THEN
        INSERT INTO custody.leases (group_id, partition, claim_no, part, lease_id, held, remaining, of_cases, attempt,
                                    size, deadline, claimed_at, worker)
        VALUES (p_lease.group_id, p_lease.partition, p_lease.claim_no, 0, p_lease.lease_id, p_fresh,
                custody.cardinality(p_fresh), false, 1, p_lease.size, p_lease.deadline, p_lease.claimed_at,
                p_lease.worker);
    END IF;
    IF p_fresh <> p_lease.held THEN
        INSERT INTO custody.leases (group_id, partition, claim_no, part, lease_id, held, remaining, of_cases, attempt,
                                    size, deadline, claimed_at, worker, first_delivery, last_error)
        SELECT p_lease.group_id, p_lease.partition, p_lease.claim_no, p.part, p_lease.lease_id, p.held,
               custody.cardinality(p.held), p.of_cases, p.attempt, p_lease.size, p_lease.deadline, p_lease.claimed_at,
               p_lease.worker, p.first_delivery, p.last_error
        FROM (
            SELECT b.part, b.held, false AS of_cases, b.attempt, b.first_delivery, b.last_error FROM unnest(p_back) b
            UNION ALL
            SELECT cardinality(p_back) + 1, custody.offsets_set(p_due), true, 0, NULL, NULL
        ) p
        WHERE NOT isempty(p.held);
    END IF;
    INSERT INTO custody.journal (entry, at, kind, group_id, partition, lease_id, offsets, worker)
    VALUES (v_entry, p_lease.claimed_at, 'claim', p_lease.group_id, p_lease.partition, p_lease.lease_id, p_lease.held,
            p_lease.worker);
END $$;
