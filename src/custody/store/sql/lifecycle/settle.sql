-- Settle: the outcome of messages of a lease. It acts only on the named offsets that the lease still holds. Offsets
-- that it does not hold are returned as lost, and so is everything after the deadline. If the same lease has settled a
-- message with the same outcome before, that is a success: a caller that got no answer may repeat the call.

CREATE TYPE custody.settled AS (
    settled  bigint,             -- messages that are settled as this call says
    lost     bigint[],           -- named, but no longer held by the lease
    dead     bigint[],           -- settled, and dead because of it
    released bigint[],           -- later messages of a key that stopped, which were not named: no longer in the lease
    already  bigint[]            -- settled before by the same lease with the same outcome
);

-- Whether the later messages of a key have to wait after this outcome. Null: there is no such outcome. Those that there
-- are: model/outcomes.py.
CREATE FUNCTION custody.stops_key(p_outcome text, p_on_dead text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_outcome IN ('nack', 'later', 'release') THEN true
                WHEN p_outcome IN ('dead', 'reject') THEN p_on_dead = 'hold'
                WHEN p_outcome IN ('ack', 'skip') THEN false END
$$;

-- One outcome for each offset.
-- p_delays: seconds until a nack or later comes back. p_acked: more done messages, as a set, which costs less. p_copy:
-- false if the caller locks heads itself, and copies the dead messages together with them (see dead_letter.sql).
-- p_exact: all or nothing, for a call in a transaction. If the lease does not hold all of it now, the call is refused
-- (lease_lost). That includes messages that were settled before: the transaction that settled them has also done what
-- belongs to it.
CREATE FUNCTION custody.settle(
    p_lease_id uuid, p_offsets bigint[], p_outcomes text[], p_errors text[] DEFAULT NULL,
    p_delays double precision[] DEFAULT NULL, p_worker text DEFAULT NULL, p_now timestamptz DEFAULT NULL,
    p_acked int8multirange DEFAULT '{}',
    p_copy boolean DEFAULT true, p_exact boolean DEFAULT false, p_tracebacks text[] DEFAULT NULL
) RETURNS custody.settled
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now     timestamptz;
    v_parts   custody.leases[];
    v_group   custody.groups;
    v_head    custody.heads;
    v_held    int8multirange;
    v_named   int8multirange := custody.offsets_set(p_offsets) + p_acked;
    v_set     record;
    v_follow  record;
    v_gone    int8multirange;
    v_put_off int8multirange := '{}';
    v_failed  boolean;
    v_dead    bigint[] := '{}';
    v_result  custody.settled := ROW(0, '{}', '{}', '{}', '{}');
BEGIN
    PERFORM custody.require_read_committed();
    IF custody.cardinality(v_named) <> cardinality(p_offsets) + custody.cardinality(p_acked)
        OR cardinality(p_offsets) <> cardinality(p_outcomes) THEN
        PERFORM custody.refuse('invalid_argument', 'each offset must be named once, with one outcome');
    ELSIF EXISTS (SELECT FROM unnest(p_outcomes) o WHERE custody.stops_key(o, 'hold') IS NULL) THEN
        PERFORM custody.refuse('invalid_argument',
            format('%L is not an outcome', (SELECT o FROM unnest(p_outcomes) o
                                            WHERE custody.stops_key(o, 'hold') IS NULL LIMIT 1)),
            'An outcome is one of ack, nack, dead, reject, later, skip and release.');
    END IF;
    v_parts := custody.lock_lease(p_lease_id);
    v_now := coalesce(p_now, clock_timestamp());
    SELECT coalesce(range_agg(l.held) FILTER (WHERE l.deadline > v_now), '{}') INTO v_held FROM unnest(v_parts) l;
    IF NOT v_named <@ v_held THEN
        IF p_exact THEN
            PERFORM custody.refuse_lost(p_lease_id, v_named - v_held);
        END IF;
        v_result := custody.settled_before(p_lease_id, v_held, v_named - v_held, p_offsets, p_outcomes, p_acked);
    END IF;
    IF NOT v_named && v_held THEN
        RETURN v_result;
    END IF;
    v_result.settled := v_result.settled + custody.cardinality(v_named * v_held);
    SELECT * INTO v_group FROM custody.groups WHERE group_id = v_parts[1].group_id;
    SELECT * INTO v_head FROM custody.heads WHERE topic_id = v_group.topic_id AND partition = v_parts[1].partition;
    v_failed := 'nack' = ANY (p_outcomes);
    IF v_group.breaker_state <> 'closed' AND v_failed THEN
        -- The message is not the cause: it is put off and not charged.
        SELECT coalesce(range_agg(int8range(o, o + 1)), '{}') INTO v_put_off FROM unnest(p_offsets, p_outcomes) m (o, x)
        WHERE x = 'nack' AND v_held @> o;
        p_outcomes := array_replace(p_outcomes, 'nack', 'later');
    END IF;

    SELECT coalesce(range_agg(int8range(o, o + 1)) FILTER (WHERE x = 'ack'), '{}') + p_acked * v_held AS ack,
           coalesce(range_agg(int8range(o, o + 1)) FILTER (WHERE x IN ('nack', 'dead', 'reject')), '{}') AS failed,
           coalesce(range_agg(int8range(o, o + 1)) FILTER (WHERE x = 'later'), '{}') AS later,
           coalesce(range_agg(int8range(o, o + 1)) FILTER (WHERE x = 'skip'), '{}') AS skipped,
           coalesce(range_agg(int8range(o, o + 1)) FILTER (WHERE x = 'release'), '{}') AS released,
           coalesce(range_agg(int8range(o, o + 1)) FILTER (WHERE custody.stops_key(x, v_group.on_dead)), '{}') AS stops
    INTO v_set
    FROM unnest(p_offsets, p_outcomes) m (o, x) WHERE v_held @> o;

    SELECT '{}'::bigint[] AS parked, '{}'::text[] AS parked_keys, '{}'::int8multirange AS released,
           '{}'::bigint[] AS leaving, NULL::bigint[] AS looked, NULL::text[] AS looked_keys INTO v_follow;
    IF v_group.ordering = 'key' AND v_held <> v_set.ack THEN
        v_follow := custody.followers(v_group, v_head, v_held, v_named, v_set.ack + v_set.skipped, v_set.failed,
                                      v_set.stops, v_set.released);
        v_result.released := v_result.released || v_follow.leaving;
    END IF;

    IF NOT isempty(v_set.ack + v_set.skipped) THEN
        PERFORM custody.settle_acked(v_group, v_head.partition, v_parts, v_set.ack + v_set.skipped);
    END IF;
    IF NOT isempty(v_set.failed) THEN
        v_dead := custody.settle_failed(v_group, v_head, v_parts, v_set.failed, p_lease_id, p_offsets, p_outcomes,
                                        p_errors, p_tracebacks, p_delays, p_worker, v_now, v_follow.looked,
                                        v_follow.looked_keys);
        v_result.dead := v_result.dead || v_dead;
    END IF;
    IF NOT isempty(v_set.later) THEN
        PERFORM custody.settle_later(v_group, v_head, v_parts, v_set.later, p_offsets, p_errors, p_delays, p_worker,
                                     v_now);
    END IF;
    IF NOT isempty(v_set.released + v_follow.released) THEN
        PERFORM custody.settle_released(v_group, v_head.partition, v_parts, v_set.released + v_follow.released, v_now);
    END IF;
    IF cardinality(v_follow.parked) > 0 THEN
        PERFORM custody.settle_parked(v_group, v_head.partition, v_parts, v_follow.parked, v_follow.parked_keys, v_now);
    END IF;

    v_gone := v_named * v_held + custody.offsets_set(v_follow.leaving);
    PERFORM custody.shrink_lease(p_lease_id, v_parts, v_gone, v_now);

    INSERT INTO custody.journal (at, kind, group_id, partition, lease_id, offsets, worker, error, detail)
    SELECT v_now, j.kind, v_group.group_id, v_head.partition, p_lease_id, j.offsets, p_worker, j.error, j.detail
    FROM (
        SELECT 'ack' AS kind, v_set.ack AS offsets, NULL::text AS error, NULL::jsonb AS detail
        UNION ALL SELECT 'later', v_set.later - v_put_off, NULL, NULL
        -- for a repeat: the outcome that the holder named
        UNION ALL SELECT 'later', v_put_off, NULL, '{"outcome": "nack"}'
        UNION ALL SELECT 'release', v_set.released + custody.offsets_set(v_follow.leaving), NULL, NULL
        UNION ALL
        SELECT s.kind, s.offsets, min(e),
               CASE WHEN count(DISTINCT coalesce(e, '')) > 1 OR count(DISTINCT coalesce(t, '')) > 1
                   THEN jsonb_object_agg(o, e)
                        || CASE WHEN count(t) > 0 THEN jsonb_build_object('tracebacks', jsonb_object_agg(o, t))
                                ELSE '{}' END
                   WHEN count(t) > 0 THEN jsonb_build_object('traceback', min(t)) END
        FROM (SELECT 'nack' AS kind, v_set.failed - custody.offsets_set(v_dead) AS offsets
              UNION ALL SELECT 'skip', v_set.skipped) s
        JOIN (SELECT o, custody.kept_error(e), custody.kept_traceback(t)
              FROM unnest(p_offsets, p_errors, p_tracebacks) n (o, e, t)) m (o, e, t) ON s.offsets @> m.o
        GROUP BY s.kind, s.offsets
    ) j
    WHERE NOT isempty(j.offsets);
    IF v_group.breaker_rate IS NOT NULL THEN
        PERFORM custody.breaker_settled(v_group, p_lease_id, NOT isempty(v_set.ack),
                                        v_failed OR NOT isempty(v_set.failed), v_now);
    END IF;
    IF p_copy AND v_group.dead_letter = 'topic' AND cardinality(v_dead) > 0 THEN
        PERFORM custody.copy_dead(v_group, custody.deaths(v_group, v_head.partition, v_dead), p_now);
    END IF;
    RETURN v_result;
END $$;

-- Locks the rows of a lease and returns them. Whoever held them before may have split them, and a statement that waited
-- for the old rows does not see the new ones: so look again until nothing has changed.
CREATE FUNCTION custody.lock_lease(p_lease_id uuid) RETURNS custody.leases[]
LANGUAGE plpgsql AS $$
DECLARE
    v_locked int[];
    v_parts  custody.leases[];
BEGIN
    LOOP
        SELECT array_agg(l.part) INTO v_locked
        FROM (SELECT part FROM custody.leases WHERE lease_id = p_lease_id ORDER BY part FOR UPDATE) l;
        SELECT array_agg(l ORDER BY l.part) INTO v_parts FROM custody.leases l WHERE l.lease_id = p_lease_id;
        EXIT WHEN v_locked IS NOT DISTINCT FROM (SELECT array_agg(l.part) FROM unnest(v_parts) l);
    END LOOP;
    RETURN v_parts;
END $$;

-- What the journal says of messages that a lease does not hold (p_gone; p_held is what it holds): settled by the same
-- lease with the same outcome, or lost.
CREATE FUNCTION custody.settled_before(
    p_lease_id uuid, p_held int8multirange, p_gone int8multirange, p_offsets bigint[], p_outcomes text[],
    p_acked int8multirange
) RETURNS custody.settled
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_past  custody.lease_record := custody.record_of(p_lease_id, p_held);
    v_other int8multirange;      -- repeated, and not acked
    v_again int8multirange;
BEGIN
    WITH past AS MATERIALIZED (
        SELECT x, custody.settled_as(v_past, x) AS offsets FROM (SELECT DISTINCT x FROM unnest(p_outcomes) x) o
    )
    SELECT coalesce(range_agg(int8range(m.o, m.o + 1)) FILTER (WHERE m.x <> 'ack'), '{}'),
           coalesce(range_agg(int8range(m.o, m.o + 1)), '{}') + p_acked * custody.settled_as(v_past, 'ack') * p_gone
    INTO v_other, v_again
    FROM unnest(p_offsets, p_outcomes) m (o, x) JOIN past p USING (x) WHERE p_gone @> m.o AND p.offsets @> m.o;
    RETURN ROW(custody.cardinality(v_again), custody.offsets_list(p_gone - v_again),
               custody.offsets_list(v_other * custody.settled_as(v_past, 'dead')),
               -- This includes what left the lease behind a message that stopped.
               CASE WHEN isempty(v_other) THEN '{}'
                    ELSE custody.offsets_list(custody.settled_as(v_past, 'release') - custody.offsets_set(p_offsets)
                                              - p_acked) END,
               custody.offsets_list(v_again))::custody.settled;
END $$;

-- Acknowledges the whole lease, in one statement whatever its size, if all that the holder has not settled is in one
-- row without cases. With several rows, cases or losses settle_lease decides.
CREATE FUNCTION custody.ack_lease(
    p_lease_id uuid, p_worker text DEFAULT NULL, p_now timestamptz DEFAULT NULL, p_exact boolean DEFAULT false
) RETURNS custody.settled
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_lease custody.leases;
BEGIN
    PERFORM custody.require_read_committed();
    DELETE FROM custody.leases l
    WHERE l.lease_id = p_lease_id AND l.remaining + l.settled = l.size AND NOT l.of_cases
      AND l.deadline > coalesce(p_now, clock_timestamp())
    RETURNING l.* INTO v_lease;
    IF v_lease.deadline > coalesce(p_now, clock_timestamp()) THEN
        INSERT INTO custody.journal (at, kind, group_id, partition, lease_id, offsets, worker)
        VALUES (coalesce(p_now, clock_timestamp()), 'ack', v_lease.group_id, v_lease.partition, p_lease_id,
                v_lease.held, p_worker);
        PERFORM custody.breaker_settled(g, p_lease_id, true, false, coalesce(p_now, clock_timestamp()))
        FROM custody.groups g WHERE g.group_id = v_lease.group_id AND g.breaker_state = 'probing';
        RETURN ROW(v_lease.remaining, '{}', '{}', '{}', '{}')::custody.settled;
    ELSIF v_lease.lease_id IS NOT NULL THEN
        -- It waited for somebody who held the row and did not change it, and the deadline has passed meanwhile.
        INSERT INTO custody.leases SELECT v_lease.*;
    END IF;
    RETURN custody.settle_lease(p_lease_id, 'ack', p_worker => p_worker, p_now => p_now, p_exact => p_exact);
END $$;

-- One outcome for every message of the lease that the holder has not settled. Lost messages are returned as lost, and
-- the rest is settled; with p_exact nothing is settled, and the call is refused. If nothing is left, it may be a
-- repeat.
CREATE FUNCTION custody.settle_lease(
    p_lease_id uuid, p_outcome text, p_error text DEFAULT NULL, p_delay double precision DEFAULT NULL,
    p_worker text DEFAULT NULL, p_now timestamptz DEFAULT NULL, p_exact boolean DEFAULT false,
    p_traceback text DEFAULT NULL
) RETURNS custody.settled
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_parts   custody.leases[];
    v_now     timestamptz;
    v_meant   record;
    v_offsets bigint[] := '{}';
    v_again   int8multirange;
    v_result  custody.settled;
BEGIN
    PERFORM custody.require_read_committed();
    v_parts := custody.lock_lease(p_lease_id);
    v_now := coalesce(p_now, clock_timestamp());
    v_meant := custody.meant(p_lease_id, v_parts, v_now);
    IF p_exact AND (isempty(v_meant.held) OR NOT isempty(v_meant.lost)) THEN
        PERFORM custody.refuse_lost(p_lease_id, v_meant.lost);
    END IF;
    IF isempty(v_meant.held) THEN
        v_again := custody.settled_as(v_meant.past, p_outcome);
        RETURN ROW(custody.cardinality(v_again), custody.offsets_list(v_meant.lost),
                   custody.offsets_list(v_again * custody.settled_as(v_meant.past, 'dead')), '{}',
                   custody.offsets_list(v_again))::custody.settled;
    END IF;
    IF p_outcome <> 'ack' THEN
        v_offsets := custody.offsets_list(v_meant.held);
    END IF;
    v_result := custody.settle(p_lease_id, v_offsets, array_fill(p_outcome, ARRAY[cardinality(v_offsets)]),
                               array_fill(p_error, ARRAY[cardinality(v_offsets)]),
                               array_fill(p_delay, ARRAY[cardinality(v_offsets)]), p_worker, v_now,
                               CASE WHEN p_outcome = 'ack' THEN v_meant.held ELSE '{}' END,
                               p_tracebacks => array_fill(p_traceback, ARRAY[cardinality(v_offsets)]));
    v_result.lost := custody.offsets_list(v_meant.lost);
    RETURN v_result;
END $$;

-- The offsets that a lease still holds.
CREATE FUNCTION custody.lease_offsets(p_lease_id uuid, p_now timestamptz DEFAULT NULL) RETURNS bigint[]
LANGUAGE sql VOLATILE AS $$
    SELECT custody.offsets_list(range_agg(held)) FROM custody.leases
    WHERE lease_id = p_lease_id AND deadline > coalesce(p_now, clock_timestamp())
$$;

-- Sets the deadline to now plus the timeout, for the whole lease or for one message, which is split off under the same
-- lease and attempt. With ordering by key the other messages of its key are extended with it: if they expired apart, a
-- later one could be settled while an earlier one is lost. Returns the new deadline, or null if nothing was extended,
-- and what the lease has lost; with p_exact a loss refuses the call.
CREATE TYPE custody.extended AS (deadline timestamptz, lost bigint[]);

CREATE FUNCTION custody.extend(
    p_lease_id uuid, p_timeout interval DEFAULT NULL, p_offset bigint DEFAULT NULL, p_now timestamptz DEFAULT NULL,
    p_exact boolean DEFAULT false
) RETURNS custody.extended
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now      timestamptz;
    v_parts    custody.leases[];
    v_part     custody.leases;
    v_meant    record;
    v_set      int8multirange;
    v_group    custody.groups;
    v_head     custody.heads;
    v_deadline timestamptz;
    v_last     int;
BEGIN
    PERFORM custody.require_read_committed();
    IF p_timeout <= '0' THEN
        PERFORM custody.refuse('invalid_argument', 'the timeout must be positive',
            'Release the message to give it back at once.');
    END IF;
    v_parts := custody.lock_lease(p_lease_id);
    v_now := coalesce(p_now, clock_timestamp());
    IF p_offset IS NULL THEN
        v_meant := custody.meant(p_lease_id, v_parts, v_now);
    ELSE
        v_set := int8multirange(int8range(p_offset, p_offset + 1));
        SELECT coalesce(range_agg(l.held), '{}') AS held, v_set - coalesce(range_agg(l.held), '{}') AS lost
        INTO v_meant FROM unnest(v_parts) l WHERE l.deadline > v_now;
    END IF;
    IF p_exact AND (isempty(v_meant.held) OR NOT isempty(v_meant.lost)) THEN
        PERFORM custody.refuse_lost(p_lease_id, v_meant.lost);
    ELSIF isempty(v_meant.held) OR NOT isempty(v_meant.lost * v_set) THEN
        RETURN ROW(NULL, custody.offsets_list(v_meant.lost))::custody.extended;
    END IF;
    SELECT max(l.part) INTO v_last FROM unnest(v_parts) l;
    SELECT * INTO v_group FROM custody.groups WHERE group_id = v_parts[1].group_id;
    v_deadline := v_now + coalesce(p_timeout, v_group.visibility_timeout);
    v_set := coalesce(v_set, v_meant.held);
    IF p_offset IS NOT NULL AND v_group.ordering = 'key' THEN
        SELECT * INTO v_head FROM custody.heads WHERE topic_id = v_group.topic_id AND partition = v_parts[1].partition;
        SELECT v_set + coalesce(range_agg(int8range(k."offset", k."offset" + 1)), '{}') INTO v_set
        FROM custody.keys_of(v_head, v_meant.held) k WHERE k.key = (SELECT o.key FROM custody.keys_of(v_head, v_set) o);
    END IF;
    UPDATE custody.leases SET deadline = v_deadline WHERE lease_id = p_lease_id AND deadline > v_now AND held <@ v_set;
    FOR v_part IN
        SELECT p.* FROM unnest(v_parts) p WHERE p.deadline > v_now AND p.held && v_set AND NOT p.held <@ v_set
    LOOP
        UPDATE custody.leases SET held = held - v_set, remaining = custody.cardinality(held - v_set)
        WHERE lease_id = p_lease_id AND part = v_part.part;
        v_last := v_last + 1;
        v_part.part := v_last;
        v_part.held := v_part.held * v_set;
        v_part.remaining := custody.cardinality(v_part.held);
        v_part.settled := 0;
        v_part.deadline := v_deadline;
        INSERT INTO custody.leases SELECT v_part.*;
    END LOOP;
    IF v_group.probe_lease = p_lease_id THEN
        UPDATE custody.groups SET probe_at = v_deadline
        WHERE group_id = v_group.group_id AND breaker_state = 'probing' AND probe_lease = p_lease_id;
    END IF;
    INSERT INTO custody.journal (at, kind, group_id, partition, lease_id, offsets, worker, detail)
    VALUES (v_now, 'extend', v_group.group_id, v_parts[1].partition, p_lease_id, v_set, v_parts[1].worker,
            jsonb_build_object('deadline', v_deadline));
    RETURN ROW(v_deadline, custody.offsets_list(v_meant.lost))::custody.extended;
END $$;
