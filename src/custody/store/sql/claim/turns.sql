-- Four kinds of messages compete for a claim: those that came back, due retries, parked ones of keys that are free
-- again, and fresh ones. They share the lease. Where it is too small for that, they take turns by the number of the
-- claim, so that a kind which never ends (messages that fail or are given back each time) does not keep the others
-- waiting.

-- What a partition has: messages in flight and their number; the end of its fresh messages; and its exceptions.
CREATE TYPE custody.claimable AS (
    held     int8multirange,
    messages bigint,
    tail     bigint,
    returned boolean,              -- messages came back
    next_due timestamptz,          -- when the next retry is due
    hints    boolean,              -- keys were freed or are awaited
    blocking boolean               -- some key may be blocked
);

-- Takes up to p_max messages, `held`: `back`, as parts of a lease; `due`; and `fresh` with the parked ones. Returns the
-- new frontier, too. If there are no messages, `reason` says why.
CREATE FUNCTION custody.take_in_turns(
    p_group custody.groups, p_head custody.heads, p_at custody.frontiers, p_has custody.claimable, p_max int,
    p_worker text, p_now timestamptz, p_due timestamptz, p_look bigint, p_stop timestamptz,
    OUT held int8multirange, OUT back custody.leases[], OUT due bigint[], OUT fresh int8multirange,
    OUT frontier bigint, OUT reason text, OUT looked bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_ordered constant boolean := (p_group).ordering = 'key';
    v_waiting constant boolean := p_has.hints OR coalesce(p_has.next_due <= p_due, false);
    v_held    int8multirange := p_has.held;    -- blocks its keys
    v_left    int8multirange;                  -- came back, and waits while the others have their turn
    v_waited  boolean := false;                -- it did, for nothing
    v_turns   boolean := true;
    v_shared  boolean := false;
    v_alone   boolean := false;                -- nothing else may be in the lease
    v_late    boolean := false;                -- p_stop has passed
    v_count   int := 0;
    v_ready   text[] := '{}';                  -- keys whose parked messages come next
    v_back    record;
    v_retries record;
    v_new     record;
BEGIN
    back := '{}';
    due := '{}';
    fresh := '{}';
    frontier := p_at.frontier;
    reason := 'empty';
    looked := 0;

    -- In two of four claims it is the turn of the others.
    IF p_has.returned AND p_at.claim_no / 2 % 2 = 1 AND (v_waiting OR p_has.tail > p_at.frontier) THEN
        v_left := custody.returned_that_waits(p_at.group_id, p_at.partition, p_max, v_ordered);
        IF v_left IS NOT NULL AND v_ordered THEN
            v_held := coalesce(v_held, '{}') + v_left;
            p_has.blocking := true;
        END IF;
    END IF;

    -- First with turns. If those whose turn it is have nothing to give, once more without turns.
    LOOP
        IF p_has.returned AND v_left IS NULL THEN
            v_back := custody.take_back(p_group, p_head, p_at, v_held, p_max, p_look - looked, p_stop, p_worker, p_now);
            back := v_back.parts;
            v_count := v_back.taken;
            v_alone := v_back.alone;
            v_late := v_late OR v_back.late;
            looked := looked + v_back.looked;
            p_has.returned := v_back.more;
        END IF;
        IF v_waiting AND NOT v_alone AND v_count < p_max THEN
            v_retries := custody.take_retries(p_group, p_head, p_at, p_has, v_held, p_max - v_count, v_turns,
                                              v_count > 0, p_worker, p_now, p_due, v_ready);
            due := v_retries.due;
            fresh := v_retries.parked;
            v_ready := v_retries.ready;
            v_shared := v_retries.shared;
            v_alone := v_retries.alone;
        END IF;
        IF NOT v_alone AND frontier = p_at.frontier THEN
            v_new := custody.take_new(p_group, p_head, p_at, p_has, v_held, v_ready,
                                      custody.taken_in_all(fresh, due, back), p_max, v_left IS NOT NULL,
                                      p_look - looked, p_stop, p_worker, p_now, p_due);
            fresh := fresh + v_new.taken;
            frontier := v_new.frontier;
            reason := v_new.reason;
            looked := looked + v_new.looked;
        END IF;
        held := custody.taken_in_all(fresh, due, back);
        EXIT WHEN NOT v_turns OR NOT isempty(held) OR NOT (v_left IS NOT NULL OR v_waiting AND v_shared);
        v_turns := false;
        v_waited := v_left IS NOT NULL;
        v_left := NULL;
        v_held := p_has.held;
        reason := 'empty';
    END LOOP;

    IF (p_group).matcher IS NOT NULL AND (looked >= p_look OR v_late) THEN
        reason := 'passed';
    ELSIF v_waited AND v_ordered AND reason = 'empty' THEN
        reason := 'busy';       -- messages parked behind what had waited may be free: the next claim wakes them
    END IF;
END $$;

-- What came back, if it can wait while the others have their turn: if it would fill the lease; if nothing of it has a
-- chunk, because that comes to an end by itself; and in an ordered group if it is little, because what follows in its
-- keys is parked meanwhile. Else null.
CREATE FUNCTION custody.returned_that_waits(p_group_id int, p_partition int, p_max int, p_ordered boolean)
RETURNS int8multirange
LANGUAGE plpgsql STABLE AS $$
DECLARE
    c_little constant int := 100;
    v_back   record;
BEGIN
    SELECT range_agg(r.ranges) AS ranges, bool_or(r.chunk IS NOT NULL) AS chunked INTO v_back
    FROM custody.returned r WHERE r.group_id = p_group_id AND r.partition = p_partition;
    RETURN CASE WHEN custody.cardinality(v_back.ranges) >= p_max AND NOT v_back.chunked
                     AND (NOT p_ordered OR custody.cardinality(v_back.ranges) <= c_little) THEN v_back.ranges END;
END $$;

-- Takes what came back. In every second claim what came back first goes first, else what is first in the log. In a
-- group that is both ordered and bound it is always the latter: what a rewind brought back may block keys without being
-- bound. A bound group matches rewound messages first, and matches more if none of them could be taken.
-- `alone`: nothing else may be in the lease. A piece with a chunk is leased alone; and in an ordered group all that
-- came back goes before the others (`more`: something is left).
CREATE FUNCTION custody.take_back(
    p_group custody.groups, p_head custody.heads, p_at custody.frontiers, p_held int8multirange, p_max int,
    p_look bigint, p_stop timestamptz, p_worker text, p_now timestamptz,
    OUT parts custody.leases[], OUT taken int, OUT more boolean, OUT alone boolean, OUT looked bigint,
    OUT late boolean
)
LANGUAGE plpgsql AS $$
DECLARE
    v_ordered constant boolean := (p_group).ordering = 'key';
    v_bound   constant boolean := (p_group).matcher IS NOT NULL;
    v_oldest  constant boolean := p_at.claim_no % 2 = 1 AND NOT (v_ordered AND v_bound);
    v_want    bigint := p_max;
BEGIN
    looked := 0;
    late := false;
    LOOP
        IF v_bound THEN
            looked := looked + custody.sift_rewound(p_group, p_head, v_want, v_oldest, p_look - looked, p_stop,
                                                    p_worker, p_now);
            v_want := v_want * 4 + 16;
        END IF;
        SELECT t.* INTO parts, taken, alone
        FROM custody.take_returned(p_group, p_head, p_held, p_max, v_oldest, p_now) t;
        EXIT WHEN NOT v_bound OR taken > 0 OR looked >= p_look OR NOT EXISTS (
            SELECT FROM custody.returned r
            WHERE r.group_id = p_at.group_id AND r.partition = p_at.partition AND r.rewound);
        late := clock_timestamp() >= p_stop;
        EXIT WHEN late;
    END LOOP;
    more := v_ordered AND EXISTS (
        SELECT FROM custody.returned r WHERE r.group_id = p_at.group_id AND r.partition = p_at.partition);
    alone := alone OR more;
END $$;

-- Takes retries: due cases, and parked messages of the keys that are ready, up to p_room. With turns they get half of
-- the room while fresh messages wait, and each of them half of that while both wait. The odd message goes to the fresh
-- ones in every second claim, and to the parked ones in four of eight.
-- With fairness the parked messages take turns with the fresh ones: see take_new. Cases that came back from a lost
-- lease are leased alone; p_others: there are other messages in the lease.
CREATE FUNCTION custody.take_retries(
    p_group custody.groups, p_head custody.heads, p_at custody.frontiers, p_has custody.claimable,
    p_held int8multirange, p_room int, p_turns boolean, p_others boolean, p_worker text, p_now timestamptz,
    p_due timestamptz, INOUT ready text[],
    OUT due bigint[], OUT alone boolean, OUT parked int8multirange, OUT shared boolean
)
LANGUAGE plpgsql AS $$
DECLARE
    v_fair constant boolean := (p_group).fairness IS NOT NULL;
    v_room int := p_room;
BEGIN
    parked := '{}';
    IF p_has.hints AND p_turns THEN
        ready := custody.wake(p_group, p_head, p_held, p_now);
    END IF;
    shared := p_turns AND (p_has.tail > p_at.frontier OR v_fair AND cardinality(ready) > 0);
    IF shared THEN
        v_room := (p_room + 1 - p_at.claim_no % 2) / 2;
    END IF;
    SELECT t.taken, t.capped AND cardinality(t.taken) > 0 INTO due, alone
    FROM custody.take_due(p_group, p_head, p_held,
                          CASE WHEN p_turns AND NOT v_fair AND cardinality(ready) > 0
                               THEN ((v_room + 1 - p_at.claim_no / 4 % 2) / 2)::int ELSE v_room END,
                          p_others OR shared AND p_at.claim_no % 2 = 1, p_worker, p_now, p_due) t;
    IF NOT alone AND NOT v_fair AND cardinality(ready) > 0 AND v_room > cardinality(due) THEN
        parked := custody.take_parked(p_group, p_at.partition, ready, v_room - cardinality(due));
    END IF;
END $$;

-- Takes fresh messages, unless a cap is reached; with fairness the parked ones of the keys that are ready, too. p_taken
-- is what the claim has taken so far. p_left: something that came back waits for this claim.
CREATE FUNCTION custody.take_new(
    p_group custody.groups, p_head custody.heads, p_at custody.frontiers, p_has custody.claimable,
    p_held int8multirange, p_ready text[], p_taken int8multirange, p_max int, p_left boolean, p_look bigint,
    p_stop timestamptz, p_worker text, p_now timestamptz, p_due timestamptz,
    OUT taken int8multirange, OUT frontier bigint, OUT reason text, OUT looked bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_fair     constant boolean := (p_group).fairness IS NOT NULL;
    v_count    constant bigint := custody.cardinality(p_taken);
    v_room     constant int := least(p_max, (p_group).max_in_flight - p_has.messages) - v_count;
    v_blocking constant boolean := p_has.blocking OR (p_group).ordering = 'key' AND v_count > 0;
BEGIN
    taken := '{}';
    frontier := p_at.frontier;
    reason := 'empty';
    looked := 0;
    IF v_count >= p_max OR NOT (p_has.tail > p_at.frontier OR v_fair AND cardinality(p_ready) > 0) THEN
        RETURN;
    END IF;
    reason := coalesce(custody.cap_reached(p_group, p_at, p_has, p_taken, v_count), 'empty');
    IF v_fair AND reason <> 'max_in_flight' THEN
        -- The turns of fairness count the claims in which it is the turn of these messages.
        p_at.claim_no := p_at.claim_no / CASE WHEN p_left THEN 4 WHEN p_has.next_due <= p_due THEN 2 ELSE 1 END;
        SELECT f.* INTO taken, frontier
        FROM custody.take_fairly(p_group, p_head, p_held, p_ready, p_at,
                                 CASE WHEN reason IN ('empty', 'max_parked') THEN p_has.tail END, v_room, p_now) f;
    ELSIF reason <> 'empty' THEN
        RETURN;
    ELSIF (p_group).matcher IS NOT NULL THEN
        SELECT f.* INTO taken, frontier
        FROM custody.take_bound(p_group, p_head, p_held, p_at.frontier, p_has.tail, v_room, p_look, p_stop, v_blocking,
                                p_worker, p_now) f;
        looked := frontier - p_at.frontier;
    ELSIF v_blocking THEN
        SELECT f.* INTO taken, frontier
        FROM custody.take_fresh(p_group, p_head, p_held, p_at.frontier, p_has.tail, v_room, p_now) f;
    ELSE
        frontier := least(p_has.tail, p_at.frontier + v_room);
        taken := int8multirange(int8range(p_at.frontier, frontier));
    END IF;
END $$;

-- The offsets that a claim has taken so far.
CREATE FUNCTION custody.taken_in_all(p_fresh int8multirange, p_due bigint[], p_back custody.leases[])
RETURNS int8multirange
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF cardinality(p_due) = 0 AND cardinality(p_back) = 0 THEN
        RETURN p_fresh;
    END IF;
    RETURN p_fresh + custody.offsets_set(p_due) + coalesce(range_agg(b.held), '{}') FROM unnest(p_back) b;
END $$;

-- The cap that keeps fresh messages from being handed out, or null. Caps hold for each group and partition. p_taken is
-- what this claim has taken so far, and p_count its number.
CREATE FUNCTION custody.cap_reached(
    p_group custody.groups, p_at custody.frontiers, p_has custody.claimable, p_taken int8multirange, p_count bigint
)
RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_count     constant bigint := p_has.messages + p_count;
    v_in_flight int8multirange;
    v_holes     bigint;
BEGIN
    IF v_count >= (p_group).max_in_flight THEN
        RETURN 'max_in_flight';
    END IF;
    -- Without exceptions there are at most as many holes as messages in flight; and there are never more than ranges in
    -- flight and waiting cases. Only if both may reach the cap, the holes are counted.
    IF v_count >= (p_group).max_ack_holes
        OR (p_group).max_ack_holes IS NOT NULL AND (p_has.returned OR p_has.next_due IS NOT NULL)
    THEN
        v_in_flight := coalesce(p_has.held, '{}') + p_taken;
        SELECT count(*) + (SELECT count(*) FROM unnest(v_in_flight)) INTO v_holes
        FROM (SELECT FROM custody.cases c
              WHERE c.group_id = p_at.group_id AND c.partition = p_at.partition AND c.state = 'waiting'
              LIMIT (p_group).max_ack_holes) w;
        IF v_holes >= (p_group).max_ack_holes
            AND custody.ack_holes(p_at, v_in_flight) >= (p_group).max_ack_holes
        THEN
            RETURN 'ack_hole_cap_exceeded';
        END IF;
    END IF;
    IF (p_group).max_parked IS NOT NULL THEN
        IF (p_group).max_parked <= (
            SELECT coalesce(sum(messages), 0) FROM custody.parked
            WHERE group_id = p_at.group_id AND partition = p_at.partition
        ) + (
            SELECT count(*) FROM custody.cases
            WHERE group_id = p_at.group_id AND partition = p_at.partition AND state = 'parked')
        THEN
            RETURN 'max_parked';
        END IF;
    END IF;
    RETURN NULL;
END $$;
