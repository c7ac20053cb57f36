-- The circuit breaker: when most of what a group tries fails, the fault is not the messages'. It stops claiming, charges
-- nobody, and tries one message from time to time until one goes well.

-- What a claim may take: everything while the breaker is closed, one message if it is time for a probe, else nothing (0).
-- The group's row stays locked, so that there is one probe at a time; who does not get the lock takes nothing.
CREATE FUNCTION custody.breaker_allows(p_group_id int, p_max int, p_now timestamptz) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    v_group custody.groups;
BEGIN
    SELECT * INTO v_group FROM custody.groups WHERE group_id = p_group_id FOR UPDATE SKIP LOCKED;
    RETURN CASE WHEN v_group.group_id IS NULL OR p_now < v_group.probe_at THEN 0
                WHEN v_group.breaker_state = 'closed' THEN p_max
                ELSE 1 END;
END $$;

-- If the one who probes dies, the next probe is due when its lease has expired.
CREATE FUNCTION custody.breaker_probes(p_group_id int, p_lease_id uuid, p_deadline timestamptz) RETURNS void
LANGUAGE sql AS $$
    UPDATE custody.groups SET breaker_state = 'probing', probe_at = p_deadline, probe_lease = p_lease_id
    WHERE group_id = p_group_id AND breaker_state <> 'closed'
$$;

-- What a settle means for the breaker: a probe closes it or opens it again; failures may open it.
CREATE FUNCTION custody.breaker_settled(p_group custody.groups, p_lease_id uuid, p_acked boolean, p_failed boolean, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_recent record;
BEGIN
    IF (p_group).breaker_state = 'probing' AND (p_group).probe_lease = p_lease_id AND (p_acked OR p_failed) THEN
        PERFORM custody.set_breaker(p_group, CASE WHEN p_failed THEN 'open' ELSE 'closed' END,
                                    CASE WHEN p_failed THEN (p_group).breaker_reason END, p_now);
    ELSIF (p_group).breaker_state = 'closed' AND p_failed THEN
        SELECT coalesce(sum(custody.cardinality(j.offsets)) FILTER (WHERE j.kind <> 'ack'), 0) AS failed,
               coalesce(sum(custody.cardinality(j.offsets)), 0) AS outcomes,
               (array_agg(j.error ORDER BY j.entry DESC) FILTER (WHERE j.kind <> 'ack'))[1] AS error
        INTO v_recent
        FROM custody.cursors c
        CROSS JOIN LATERAL (
            SELECT * FROM custody.journal x
            WHERE x.group_id = c.group_id AND x.partition = c.partition AND x.at > p_now - (p_group).breaker_window
              AND x.at > coalesce((p_group).breaker_since, '-infinity') AND x.kind IN ('ack', 'nack', 'dead')
            ORDER BY x.entry DESC LIMIT 200) j
        WHERE c.group_id = (p_group).group_id;
        IF v_recent.outcomes >= (p_group).breaker_outcomes AND v_recent.failed >= (p_group).breaker_rate * v_recent.outcomes THEN
            PERFORM custody.set_breaker(p_group, 'open',
                format('%s of the last %s messages failed, the last one with: %s', v_recent.failed, v_recent.outcomes,
                       coalesce(v_recent.error, 'no error given')), p_now);
        END IF;
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
