-- Settling a lease and claiming the next one in one transaction.

-- Settles messages of a lease before a claim of the same group, in its transaction. Returns the deaths that the claim
-- copies in its last step, or null.
CREATE FUNCTION custody.settle_before(
    p_group custody.groups, p_lease_id uuid, p_offsets bigint[], p_outcomes text[], p_errors text[],
    p_delays double precision[], p_worker text, p_now timestamptz, p_acked int8multirange, p_tracebacks text[],
    OUT settled custody.settled, OUT died custody.death[]
)
LANGUAGE plpgsql AS $$
DECLARE
    v_of   record;
    v_dead bigint[];
BEGIN
    SELECT l.group_id, l.partition INTO v_of FROM custody.leases l WHERE l.lease_id = p_lease_id LIMIT 1;
    IF v_of.group_id <> (p_group).group_id THEN
        PERFORM custody.refuse('invalid_argument', format('lease %s is of another group', p_lease_id),
            'Settle it by itself, or claim from its own topic and group.');
    END IF;
    settled := custody.settle(p_lease_id, p_offsets, p_outcomes, p_errors, p_delays, p_worker, p_now, p_acked,
                              p_copy => false, p_tracebacks => p_tracebacks);
    IF (p_group).dead_letter = 'topic' AND cardinality(settled.dead) > 0 THEN
        SELECT array_agg(o) INTO v_dead FROM unnest(settled.dead) o WHERE NOT o = ANY (settled.already);
        died := custody.deaths(p_group, v_of.partition, v_dead);
    END IF;
END $$;
