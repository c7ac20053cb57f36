-- The circuit breaker. If most messages of a group fail, the messages are not the cause. The group stops claiming,
-- charges no message, and probes with one message from time to time until one succeeds.

-- How many messages a claim may take: all while the breaker is closed, one if a probe is due, else 0. The row of the
-- group stays locked, so there is one probe at a time. A claim that does not get the lock takes nothing.
CREATE FUNCTION custody.breaker_allows(p_group_id int, p_max int, p_now timestamptz) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    v_group custody.groups;
BEGIN
    SELECT * INTO v_group FROM custody.groups WHERE group_id = p_group_id FOR NO KEY UPDATE SKIP LOCKED;
    RETURN CASE WHEN v_group.group_id IS NULL OR p_now < v_group.probe_at THEN 0
                WHEN v_group.breaker_state = 'closed' THEN p_max
                ELSE 1 END;
END $$;

-- Records the probe. If its worker dies, the next probe is due when the lease expires.
CREATE FUNCTION custody.breaker_probes(p_group_id int, p_lease_id uuid, p_deadline timestamptz) RETURNS void
LANGUAGE sql AS $$
    UPDATE custody.groups SET breaker_state = 'probing', probe_at = p_deadline, probe_lease = p_lease_id
    WHERE group_id = p_group_id AND breaker_state <> 'closed'
$$;

-- Why the recent outcomes of the group should open its breaker, or null. It reads only the newest journal rows of each
-- partition, so a settle does not pay for the length of the history.
CREATE FUNCTION custody.failing(p_group custody.groups, p_now timestamptz) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('%s of the last %s messages failed, the last one with: %s', r.failed, r.outcomes,
                  coalesce(r.error, 'no error given'))
    FROM (
        SELECT coalesce(sum(custody.cardinality(j.offsets)) FILTER (WHERE j.kind <> 'ack'), 0) AS failed,
               coalesce(sum(custody.cardinality(j.offsets)), 0) AS outcomes,
               (array_agg(j.error ORDER BY j.entry DESC) FILTER (WHERE j.kind <> 'ack'))[1] AS error
        FROM custody.cursors c
        CROSS JOIN LATERAL (
            -- A range instead of two equalities: only one index has this order, so no plan reads rows of other groups
            -- backwards.
            SELECT x.* FROM custody.journal x
            WHERE (x.group_id, x.partition, x.entry) <= (c.group_id, c.partition, 9223372036854775807)
            ORDER BY x.group_id DESC, x.partition DESC,
                x.entry DESC LIMIT greatest(200, 4 * (p_group).breaker_outcomes)) j
        WHERE c.group_id = (p_group).group_id AND j.group_id = c.group_id AND j.partition = c.partition
          AND j.kind IN ('ack', 'nack', 'dead')
          AND j.at > p_now - (p_group).breaker_window AND j.at > coalesce((p_group).breaker_since, '-infinity')
    ) r
    WHERE r.outcomes >= (p_group).breaker_outcomes AND r.failed >= (p_group).breaker_rate * r.outcomes
$$;

-- What a settle means for the breaker. A probe closes it, opens it again, or makes room for another probe if it was
-- given back untried. Failures may open it. p_group was read without a lock and shows whether there is something to
-- decide; the locked row decides.
CREATE FUNCTION custody.breaker_settled(
    p_group custody.groups, p_lease_id uuid, p_acked boolean, p_failed boolean, p_now timestamptz
)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_group  custody.groups;
    v_reason text;
BEGIN
    IF (p_group).probe_lease IS DISTINCT FROM p_lease_id
        AND NOT ((p_group).breaker_state = 'closed' AND p_failed AND custody.failing(p_group, p_now) IS NOT NULL)
    THEN
        RETURN;
    END IF;
    SELECT * INTO v_group FROM custody.groups WHERE group_id = (p_group).group_id FOR NO KEY UPDATE;
    IF v_group.breaker_state = 'closed' THEN
        v_reason := CASE WHEN p_failed THEN custody.failing(v_group, p_now) END;
        IF v_reason IS NOT NULL THEN
            PERFORM custody.set_breaker(v_group, 'open', v_reason, p_now);
        END IF;
    ELSIF v_group.probe_lease = p_lease_id AND p_failed THEN
        PERFORM custody.set_breaker(v_group, 'open', v_group.breaker_reason, p_now);
    ELSIF v_group.probe_lease = p_lease_id AND p_acked THEN
        PERFORM custody.set_breaker(v_group, 'closed', NULL, p_now);
    ELSIF v_group.probe_lease = p_lease_id THEN
        UPDATE custody.groups SET breaker_state = 'open', probe_at = p_now, probe_lease = NULL
        WHERE group_id = v_group.group_id;
    END IF;
END $$;

CREATE FUNCTION custody.set_breaker(p_group custody.groups, p_state text, p_reason text, p_now timestamptz) RETURNS void
LANGUAGE sql AS $$
    UPDATE custody.groups
    SET breaker_state = p_state, breaker_reason = p_reason, breaker_since = p_now, probe_lease = NULL,
        probe_at = CASE WHEN p_state = 'open' THEN p_now + breaker_probe END
    WHERE group_id = (p_group).group_id;
    INSERT INTO custody.journal (at, kind, group_id, error, detail)
    VALUES (p_now, 'breaker', (p_group).group_id, p_reason, jsonb_build_object('state', p_state))
$$;
