-- Commit of a claim: the outcomes of its messages and the messages that they publish, in one transaction that happens
-- once.

-- The later messages of the keys of p_stops, within p_held: they have to wait, too.
CREATE FUNCTION custody.behind(p_head custody.heads, p_held int8multirange, p_stops int8multirange)
RETURNS int8multirange
LANGUAGE sql STABLE AS $$
    WITH stopped AS MATERIALIZED (
        SELECT k.key, min(k."offset") AS first FROM custody.keys_of(p_head, p_stops) k WHERE k.key IS NOT NULL
        GROUP BY k.key
    )
    SELECT coalesce(range_agg(int8range(m."offset", m."offset" + 1)), '{}')
    FROM custody.keys_of(p_head, p_held, (SELECT array_agg(s.key) FROM stopped s)) m JOIN stopped s USING (key)
    WHERE m."offset" > s.first AND EXISTS (SELECT FROM stopped)
$$;

-- The outcomes of one lease: the messages that it still holds and that are done, and those that are settled otherwise.
CREATE TYPE custody.part_outcome AS (
    held int8multirange, done int8multirange, offsets bigint[], outcomes text[], errors text[],
    delays double precision[]
);

-- The arrays name the messages that failed (offsets, outcomes, errors, delays), and p_left those that were not run
-- (multiranges). All others are done, unless they are behind one of those in their key.
CREATE FUNCTION custody.outcome_of_part(
    p_group custody.groups, p_claim bigint, p_part custody.pipeline_parts,
    p_partitions int[], p_offsets bigint[], p_outcomes text[], p_errors text[], p_delays double precision[],
    p_left_partitions int[], p_left text[], p_now timestamptz
) RETURNS custody.part_outcome
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_head   custody.heads;
    v_left   int8multirange;
    v_named  record;
    v_stops  int8multirange;
    v_result custody.part_outcome;
BEGIN
    SELECT h.* INTO v_head FROM custody.heads h
    WHERE h.topic_id = (p_group).topic_id AND h.partition = p_part.partition;
    SELECT coalesce(range_agg(l.held) FILTER (WHERE l.deadline > p_now), '{}') INTO v_result.held FROM custody.leases l
    WHERE l.lease_id = p_part.lease_id;
    SELECT coalesce(range_agg(x.s::int8multirange), '{}') INTO v_left FROM unnest(p_left_partitions, p_left) x (p, s)
    WHERE x.p = p_part.partition;
    SELECT array_agg(m.o) AS offsets, array_agg(m.x) AS outcomes, array_agg(m.e) AS errors, array_agg(m.d) AS delays,
           coalesce(range_agg(int8range(m.o, m.o + 1)), '{}') AS named,
           coalesce(range_agg(int8range(m.o, m.o + 1))
                    FILTER (WHERE custody.stops_key(m.x, (p_group).on_dead)), '{}') AS stops
    INTO v_named
    FROM (SELECT * FROM unnest(p_partitions, p_offsets, p_outcomes, p_errors, p_delays) f (p, o, x, e, d)
          UNION ALL
          SELECT b.partition, b."offset", 'dead', b.error, NULL FROM custody.malformed b
          WHERE b.group_id = (p_group).group_id AND b.claim = p_claim
            AND (b.partition, b."offset") NOT IN (SELECT * FROM unnest(p_partitions, p_offsets))) m
    WHERE m.p = p_part.partition AND v_result.held @> m.o;
    v_result.done := v_result.held - v_named.named - v_left;
    -- What is behind a message that was lost waits for it: it may have been made of it, and would overtake it.
    v_stops := (v_named.stops + v_left) * v_result.held
               + (p_part.held - v_result.held) * int8multirange(int8range(0, coalesce(upper(v_result.held), 0)));
    IF (p_group).ordering = 'key' AND NOT isempty(v_stops) THEN
        v_result.done := v_result.done - custody.behind(v_head, v_result.held, v_stops);
        -- A message that failed behind one that was stopped has to wait, too, whatever its outcome.
        SELECT array_agg(m.o) AS offsets, array_agg(m.x) AS outcomes, array_agg(m.e) AS errors, array_agg(m.d) AS delays
        INTO v_named.offsets, v_named.outcomes, v_named.errors, v_named.delays
        FROM unnest(v_named.offsets, v_named.outcomes, v_named.errors, v_named.delays) m (o, x, e, d),
             (SELECT custody.behind(v_head, v_named.named + v_stops, v_stops) AS waiting OFFSET 0) w
        WHERE NOT w.waiting @> m.o;
    END IF;
    v_result.offsets := coalesce(v_named.offsets, '{}');
    v_result.outcomes := coalesce(v_named.outcomes, '{}');
    v_result.errors := coalesce(v_named.errors, '{}');
    v_result.delays := coalesce(v_named.delays, '{}');
    RETURN v_result;
END $$;

-- Commits a claim in one transaction: the outcomes of its messages, as in outcome_of_part, and what they published.
-- p_placed_…: what was staged (see publish_staged). p_ran: with p_exact, for how many messages output was staged; if
-- exactly those are done, all of it is published as it is, else only the output of the done ones. p_done: so many have
-- to be done, because only their output was written outside (see pipeline_writes.sql). A repeat changes nothing and
-- returns what the first commit did.
CREATE FUNCTION custody.commit_claim(
    p_topic text, p_group text, p_epoch bigint, p_claim bigint,
    p_partitions int[], p_offsets bigint[], p_outcomes text[], p_errors text[], p_delays double precision[],
    p_left_partitions int[], p_left text[],      -- multiranges
    p_placed_attempts bigint[], p_placed_topics int[], p_placed_partitions int[], p_placed_counts int[],
    p_placed_of int[], p_exact boolean, p_ran bigint, p_done bigint DEFAULT NULL, p_worker text DEFAULT NULL,
    p_query text DEFAULT NULL, p_batch bigint DEFAULT NULL, p_now timestamptz DEFAULT NULL,
    p_tracebacks text[] DEFAULT NULL,            -- of the messages that failed
    p_states jsonb DEFAULT NULL,                 -- of a keyed pipeline: see commit_states
    OUT repeated boolean, OUT counts jsonb
)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_group    custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_pipeline custody.pipelines := custody.driven_by(v_group, p_epoch);
    v_claim    custody.pipeline_claims;
    v_part     custody.pipeline_parts;
    v_now      timestamptz;
    v_out      custody.part_outcome;
    v_settled  custody.settled;
    v_sources  int[] := '{}';
    v_sets     int8multirange[] := '{}';
    v_died     custody.death[];
    v_result   custody.pipeline_batches;
BEGIN
    SELECT * INTO v_claim FROM custody.pipeline_claims c WHERE c.group_id = v_group.group_id;
    IF v_claim.claim IS DISTINCT FROM p_claim THEN
        SELECT true, custody.counts_of(b) INTO repeated, counts
        FROM custody.pipeline_batches b WHERE b.group_id = v_group.group_id AND b.claim = p_claim;
        IF NOT FOUND THEN
            PERFORM custody.refuse('claim_lost',
                format('claim %s of group %L is not in flight: all of it was taken away', p_claim, p_group),
                'Nothing was published of it; its messages are delivered again.');
        END IF;
        RETURN;
    END IF;
    v_result := ROW(v_group.group_id, p_claim, p_epoch, v_pipeline.driver, p_query, p_batch,
                    0, 0, 0, 0, 0, 0, 0, 0, 0, v_claim.claimed_at, NULL);
    FOR v_part IN SELECT * FROM custody.pipeline_parts p WHERE p.group_id = v_group.group_id ORDER BY p.partition LOOP
        PERFORM custody.lock_lease(v_part.lease_id);
        v_now := coalesce(p_now, clock_timestamp());
        v_out := custody.outcome_of_part(v_group, p_claim, v_part, p_partitions, p_offsets, p_outcomes, p_errors,
                                         p_delays, p_left_partitions, p_left, v_now);
        v_result.messages := v_result.messages + v_part.messages;
        v_result.lost := v_result.lost + custody.cardinality(v_part.held - v_out.held);
        IF NOT isempty(v_out.done) OR cardinality(v_out.offsets) > 0 THEN
            v_settled := custody.settle(v_part.lease_id, v_out.offsets, v_out.outcomes, v_out.errors, v_out.delays,
                                        p_worker, v_now, v_out.done, false, p_tracebacks => (
                                            SELECT array_agg(f.t ORDER BY m.n)
                                            FROM unnest(v_out.offsets) WITH ORDINALITY m (o, n)
                                            LEFT JOIN unnest(p_partitions, p_offsets, p_tracebacks) f (p, o, t)
                                                ON f.p = v_part.partition AND f.o = m.o));
            v_result.released := v_result.released + cardinality(v_settled.released);
            v_result.dead := v_result.dead + cardinality(v_settled.dead);
            IF v_group.dead_letter = 'topic' AND cardinality(v_settled.dead) > 0 THEN
                v_died := v_died || custody.deaths(v_group, v_part.partition, v_settled.dead);
            END IF;
        END IF;
        v_result.done := v_result.done + custody.cardinality(v_out.done);
        SELECT v_result.failed + count(*) FILTER (WHERE x NOT IN ('later', 'skip')),
               v_result.later + count(*) FILTER (WHERE x = 'later'),
               v_result.skipped + count(*) FILTER (WHERE x = 'skip')
        INTO v_result.failed, v_result.later, v_result.skipped FROM unnest(v_out.outcomes) x;
        v_result.released := v_result.released + custody.release_rest(v_part.lease_id, p_worker, p_now);
        v_sources := v_sources || v_part.partition;
        v_sets := v_sets || v_out.done;
    END LOOP;
    IF v_result.done <> p_done THEN
        PERFORM custody.refuse('stage_lost',
            format('%s of %s messages whose results were written are done', v_result.done, p_done),
            'Run the batch again: their leases were lost meanwhile.');
    END IF;
    UPDATE custody.pipeline_writes w SET committed = true
    WHERE w.group_id = v_group.group_id AND w.claim = p_claim AND w.epoch = p_epoch;
    IF v_died IS NOT NULL THEN
        PERFORM custody.lock_copies(v_group, v_died, p_placed_topics, p_placed_partitions);
    END IF;
    v_result.outputs := custody.publish_staged(
        v_claim.stage, p_placed_attempts, p_placed_topics, p_placed_partitions, p_placed_counts, p_placed_of,
        p_exact AND p_ran = v_result.done, v_sources, v_sets, p_now);
    PERFORM custody.commit_states(v_group, v_pipeline, v_claim, p_states, v_sources, v_sets, p_now);
    IF v_died IS NOT NULL THEN
        PERFORM custody.copy_dead(v_group, v_died, p_now);
    END IF;
    v_result.committed_at := coalesce(p_now, clock_timestamp());
    INSERT INTO custody.pipeline_batches SELECT v_result.*;
    PERFORM custody.forget_claim(v_group.group_id);
    repeated := false;
    counts := custody.counts_of(v_result);
END $$;
