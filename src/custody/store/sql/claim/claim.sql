-- Claim: hands out up to n messages of one partition under one lease.

-- The key behind which most messages wait.
CREATE FUNCTION custody.most_parked(p_group_id int) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('%s messages wait behind key %L of partition %s', sum(messages), key, partition)
    FROM (
        SELECT partition, key, messages FROM custody.parked WHERE group_id = p_group_id
        UNION ALL
        SELECT partition, key, 1 FROM custody.cases WHERE group_id = p_group_id AND state = 'parked') p
    GROUP BY partition, key ORDER BY sum(messages) DESC, partition, key LIMIT 1
$$;

-- The partitions of a group that have something to give, in random order. Those that may only have keys behind a live
-- lease come last.
CREATE FUNCTION custody.claim_candidates(p_group custody.groups, p_now timestamptz) RETURNS int[]
LANGUAGE sql VOLATILE AS $$
    SELECT array_agg(x.partition ORDER BY x.certain DESC, random())
    FROM (
        SELECT c.partition,
               t.next_offset > f.frontier
               OR h.delayed_from IS NOT NULL AND coalesce(custody.next_delivery(h) <= p_now, false)
               OR EXISTS (SELECT FROM custody.returned r WHERE r.group_id = c.group_id AND r.partition = c.partition)
               OR coalesce((SELECT min(s.run_at) FROM custody.cases s
                            WHERE s.group_id = c.group_id AND s.partition = c.partition
                            AND s.state = 'waiting') <= p_now, false)
               OR EXISTS (SELECT FROM custody.freed d WHERE d.group_id = c.group_id AND d.partition = c.partition)
               OR EXISTS (SELECT FROM custody.leases l WHERE l.group_id = c.group_id AND l.partition = c.partition
                          AND l.claim_no >= f.oldest_claim AND l.deadline <= p_now)
               OR EXISTS (SELECT FROM custody.outbox o
                          WHERE o.topic_id = h.topic_id AND o.partition = h.partition AND o.ended_at IS NULL
                          AND o.available_at <= p_now) AS certain,
               EXISTS (SELECT FROM custody.awaited a
                       WHERE a.group_id = c.group_id AND a.partition = c.partition) AS possible
        FROM custody.cursors c
        JOIN custody.heads h ON h.topic_id = (p_group).topic_id AND h.partition = c.partition
        CROSS JOIN LATERAL custody.tail(h) t
        CROSS JOIN LATERAL custody.position(c.group_id, c.partition) f
        WHERE c.group_id = (p_group).group_id
    ) x
    WHERE x.certain OR x.possible
$$;

-- Waits a little for a cursor. Returns true if it is locked now. The lock_timeout of the caller stays as it is.
CREATE FUNCTION custody.await_cursor(p_group_id int, p_partition int) RETURNS boolean
LANGUAGE plpgsql SET lock_timeout = '250ms' AS $$
BEGIN
    PERFORM 1 FROM custody.cursors WHERE group_id = p_group_id AND partition = p_partition FOR UPDATE;
    RETURN FOUND;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;

-- The first row describes the lease in `lease`: lease_id, partition, deadline, the priority of its messages and the uid
-- of the topic. If there is none, it has the reason (empty, busy, paused, breaker_open or the cap that was reached) and
-- a detail of it. The rows after it are the messages, by offset.
-- A claim of a bound group matches 10,000 messages at most, or as many as it wants if that is more, and for about half
-- a second. If none of them could be handed out and there are more, it is busy and its detail says to claim again.
-- With p_bytes a lease ends with the message that reaches so much payload. p_heads_held: the transaction has claimed or
-- published before.
-- With p_slices messages of a batch come as slices, in no order (see custody.slice).
-- With p_settle it first acks what is left of that lease, in the same transaction; or with p_outcomes it settles its
-- messages, as custody.settle does. The answer is in `settled` of the first row. Who holds a lease does not wait for a
-- cursor, because a rewind takes them in the other order.
-- The statements of a claim without exceptions read a few rows by their keys, so generic plans are right for them, and
-- planning takes longer than running. What looks for exceptions has `plan_cache_mode = auto`.
CREATE FUNCTION custody.claim(
    p_topic text, p_group text, p_max int DEFAULT 1, p_visibility interval DEFAULT NULL, p_worker text DEFAULT NULL,
    p_partition int DEFAULT NULL, p_now timestamptz DEFAULT NULL, p_bytes bigint DEFAULT NULL,
    p_heads_held boolean DEFAULT false, p_settle uuid DEFAULT NULL, p_slices boolean DEFAULT false,
    p_offsets bigint[] DEFAULT NULL, p_outcomes text[] DEFAULT NULL, p_errors text[] DEFAULT NULL,
    p_delays double precision[] DEFAULT NULL, p_acked int8multirange DEFAULT '{}', p_tracebacks text[] DEFAULT NULL
) RETURNS TABLE (
    lease jsonb, "offset" bigint, published_at timestamptz, key text, kind text, payload bytea, headers jsonb,
    attempt int, first_delivery timestamptz, last_error text, ends int[], keys text[]
)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_group      custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_topic      custody.topics;
    v_head       custody.heads;
    v_candidates int[];
    v_partition  int;
    v_tried      boolean := false;
    v_claim      record;
    v_lease      custody.leases;
    v_source     record;
    v_reason     text := 'empty';
    v_binding    int;
    v_look       bigint := greatest(10000, p_max);
    v_stop       timestamptz := clock_timestamp() + interval '500 ms';
    v_passed     boolean := false;
    v_settled    jsonb;
    v_before     record;
    v_detail     text;
BEGIN
    PERFORM custody.require_read_committed();
    SELECT p_heads_held AS heads_held, NULL::custody.death[] AS died, 'empty' AS reason INTO v_claim;
    IF p_max IS NULL OR p_max < 1 THEN
        PERFORM custody.refuse('invalid_argument', 'max_messages must be at least 1');
    ELSIF p_visibility <= '0' THEN
        PERFORM custody.refuse('invalid_argument', 'the visibility timeout must be positive');
    END IF;
    IF p_outcomes IS NOT NULL THEN
        v_before := custody.settle_before(v_group, p_settle, p_offsets, p_outcomes, p_errors, p_delays, p_worker, p_now,
                                          p_acked, p_tracebacks);
        v_settled := to_jsonb(v_before.settled);
        v_claim.died := v_before.died;
        IF v_group.breaker_rate IS NOT NULL THEN
            v_group := custody.lifecycle_group(p_topic, p_group);       -- the outcomes may have changed it
        END IF;
    ELSIF p_settle IS NOT NULL THEN
        v_settled := to_jsonb(custody.ack_lease(p_settle, p_worker, p_now));
        IF v_group.breaker_state <> 'closed' THEN
            v_group := custody.lifecycle_group(p_topic, p_group);       -- the acks may have closed it
        END IF;
    END IF;
    IF v_group.paused_at IS NOT NULL THEN
        v_reason := 'paused';
        v_detail := v_group.paused_reason;
    ELSIF v_group.breaker_state <> 'closed' THEN
        p_max := custody.breaker_allows(v_group.group_id, p_max, coalesce(p_now, clock_timestamp()));
        IF p_max = 0 THEN
            v_reason := 'breaker_open';
            v_detail := v_group.breaker_reason;
        END IF;
    END IF;
    IF v_reason <> 'empty' THEN
        IF v_claim.died IS NOT NULL THEN
            PERFORM custody.copy_dead(v_group, v_claim.died, p_now);
        END IF;
        lease := custody.no_lease(v_reason, v_detail, v_settled);
        RETURN NEXT;
        RETURN;
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
                v_candidates := custody.candidates_by_priority(v_group, v_topic.starvation_limit,
                                                               coalesce(p_now, clock_timestamp()));
            END IF;
            v_candidates := coalesce(v_candidates, '{}');
        EXCEPTION WHEN undefined_table OR undefined_function THEN
            v_candidates := '{}';       -- the segment that it read was dropped, and the functions that read it
            v_reason := 'busy';
        END;
    END IF;

    -- First without waiting for a lock. If all candidates were locked, wait a little for the first one.
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
            -- The group may have been bound anew since it was read.
            IF v_binding IS DISTINCT FROM v_group.binding_no THEN
                SELECT g.matcher, g.binding_no, g.fairness INTO v_group.matcher, v_group.binding_no, v_group.fairness
                FROM custody.groups g WHERE g.group_id = v_group.group_id;
            END IF;
            SELECT h.* INTO v_head FROM custody.heads h
            WHERE h.topic_id = v_group.topic_id AND h.partition = v_partition;
            v_claim := custody.claim_partition(v_group, v_head, p_max,
                                               coalesce(p_visibility, v_group.visibility_timeout), p_worker,
                                               coalesce(p_now, clock_timestamp()), NULL, NULL, v_look, v_stop,
                                               v_claim.heads_held, v_claim.died);
            EXIT WHEN v_claim.reason IS NULL;
            IF v_claim.reason <> 'empty' THEN
                v_reason := v_claim.reason;
            END IF;
            v_look := v_look - v_claim.looked;
            v_passed := v_passed OR v_reason = 'passed' OR v_look <= 0;
            EXIT WHEN v_round = 2 OR v_look <= 0 OR v_passed AND clock_timestamp() >= v_stop;
        END LOOP;
        EXIT WHEN v_tried OR cardinality(v_candidates) = 0 OR p_settle IS NOT NULL;
    END LOOP;

    IF v_claim.died IS NOT NULL THEN
        PERFORM custody.copy_dead(v_group, v_claim.died, p_now);
    END IF;
    IF v_claim.reason IS NOT NULL THEN
        IF v_passed THEN
            v_reason := 'busy';
            v_detail := 'No bound message among those scanned; claim again';
        ELSIF v_reason = 'max_parked' THEN
            v_detail := custody.most_parked(v_group.group_id);
        END IF;
        lease := custody.no_lease(v_reason, v_detail, v_settled);
        RETURN NEXT;
        RETURN;
    END IF;
    v_lease := v_claim.lease;
    IF v_claim.died IS NOT NULL THEN
        -- The copies may have waited for heads, so the visibility timeout begins now.
        v_lease.deadline := coalesce(p_now, clock_timestamp()) + coalesce(p_visibility, v_group.visibility_timeout);
        UPDATE custody.leases l SET deadline = v_lease.deadline WHERE l.lease_id = v_lease.lease_id;
    END IF;
    IF v_group.breaker_state <> 'closed' THEN
        PERFORM custody.breaker_probes(v_group.group_id, v_lease.lease_id, v_lease.deadline);
    END IF;
    lease := jsonb_build_object(
        'lease_id', v_lease.lease_id, 'partition', v_partition, 'deadline', v_lease.deadline,
        'priority', CASE WHEN v_topic.starvation_limit IS NOT NULL THEN custody.lane(v_partition) END,
        'topic_uid', v_topic.uid, 'settled', v_settled);
    RETURN NEXT;
    IF p_max > 1 AND custody.give_back_beyond(p_bytes, v_claim.head, v_lease.lease_id) OR v_claim.parts > 1
        OR v_claim.fresh IS NULL
    THEN
        RETURN QUERY
        SELECT NULL::jsonb, m.*
        FROM custody.leased_messages(v_group.group_id, v_claim.head, v_lease.claim_no, p_slices) m
        ORDER BY m."offset";
    ELSIF NOT p_slices THEN
        RETURN QUERY
        SELECT NULL::jsonb, e."offset", e.published_at, e.key, e.kind::text, e.payload, e.headers, 1,
               NULL::timestamptz, NULL::text, NULL::int[], NULL::text[]
        FROM custody.events_in(v_claim.head, int8multirange(v_claim.fresh)) e;
    ELSE
        FOR v_source IN
            SELECT * FROM custody.segments_over(v_claim.head, lower(v_claim.fresh), upper(v_claim.fresh))
        LOOP
            RETURN QUERY EXECUTE format(
                'SELECT NULL::jsonb, "offset", published_at, key, kind, payload, headers, 1, NULL::timestamptz,
                        NULL::text, ends, keys FROM (%s) s', v_source.slices)
            USING v_source.from_offset, v_source.until_offset;
        END LOOP;
    END IF;
END $$;

-- The first row of a claim that has handed out nothing.
CREATE FUNCTION custody.no_lease(p_reason text, p_detail text, p_settled jsonb) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object('reason', p_reason, 'detail', p_detail, 'settled', p_settled)
$$;
