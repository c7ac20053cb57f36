-- Sinks outside the database. The output of a claim is written before the commit and published after it. A row of
-- pipeline_writes is inserted before anything is written, and deleted when nothing is left to do. If a driver dies in
-- between, the next one finds the row.

-- Called before output is written outside: which messages of the claim will be done, by partition. Arrays as in
-- outcome_of_part. Nothing is settled yet. The commit refuses if it comes to another number.
CREATE FUNCTION custody.begin_write(
    p_topic text, p_group text, p_epoch bigint, p_claim bigint,
    p_partitions int[], p_offsets bigint[], p_outcomes text[], p_errors text[], p_delays double precision[],
    p_left_partitions int[], p_left text[], p_token text, p_sinks text[], p_now timestamptz DEFAULT NULL
) RETURNS TABLE (partition int, held int8multirange, done int8multirange)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_now   timestamptz;
    v_part  custody.pipeline_parts;
    v_out   custody.part_outcome;
BEGIN
    PERFORM custody.driven_by(v_group, p_epoch);
    v_now := coalesce(p_now, clock_timestamp());
    IF NOT EXISTS (SELECT FROM custody.pipeline_claims c WHERE c.group_id = v_group.group_id AND c.claim = p_claim) THEN
        PERFORM custody.refuse('claim_lost', format('claim %s of group %L is not in flight', p_claim, p_group),
            'It was committed, or all of it was taken away.');
    END IF;
    INSERT INTO custody.pipeline_writes VALUES (v_group.group_id, p_claim, p_epoch, p_token, p_sinks, false)
    ON CONFLICT (group_id, claim) DO UPDATE SET epoch = excluded.epoch, token = excluded.token, sinks = excluded.sinks;
    FOR v_part IN SELECT * FROM custody.pipeline_parts p WHERE p.group_id = v_group.group_id ORDER BY p.partition LOOP
        v_out := custody.outcome_of_part(v_group, p_claim, v_part, p_partitions, p_offsets, p_outcomes, p_errors,
                                         p_delays, p_left_partitions, p_left, v_now);
        partition := v_part.partition;
        held := v_part.held;
        done := v_out.done;
        RETURN NEXT;
    END LOOP;
END $$;

-- Output that was begun outside and is not finished: to be published if it was committed, else to be removed. Without
-- the claim in flight.
CREATE FUNCTION custody.open_writes(p_topic text, p_group text, p_epoch bigint)
RETURNS TABLE (claim bigint, epoch bigint, token text, sinks text[], committed boolean)
LANGUAGE plpgsql AS $$
DECLARE
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
BEGIN
    PERFORM custody.driven_by(v_group, p_epoch);
    RETURN QUERY
        SELECT w.claim, w.epoch, w.token, w.sinks, w.committed FROM custody.pipeline_writes w
        WHERE w.group_id = v_group.group_id
          AND (w.committed OR NOT EXISTS (SELECT FROM custody.pipeline_claims c
                                          WHERE c.group_id = w.group_id AND c.claim = w.claim))
        ORDER BY w.claim;
END $$;

-- Nothing is left to do for the output of a claim.
CREATE FUNCTION custody.end_write(p_topic text, p_group text, p_epoch bigint, p_claim bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
BEGIN
    PERFORM custody.driven_by(v_group, p_epoch);
    DELETE FROM custody.pipeline_writes w WHERE w.group_id = v_group.group_id AND w.claim = p_claim;
END $$;
