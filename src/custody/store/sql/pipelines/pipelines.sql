-- Pipelines: groups that Spark drives. Every call is fenced by the epoch, and a repeated commit is recognised by the
-- number of its claim. Locks: pipeline → cursor → lease → head.

-- The row of the pipeline, locked, if this epoch still drives it.
CREATE FUNCTION custody.driven_by(p_group custody.groups, p_epoch bigint) RETURNS custody.pipelines
LANGUAGE plpgsql AS $$
DECLARE
    v_pipeline custody.pipelines;
BEGIN
    PERFORM custody.require_read_committed();
    SELECT * INTO v_pipeline FROM custody.pipelines WHERE group_id = (p_group).group_id FOR UPDATE;
    IF v_pipeline.epoch IS DISTINCT FROM p_epoch THEN
        PERFORM custody.refuse('pipeline_fenced',
            format('the pipeline of group %L is driven by %s now (epoch %s), not by epoch %s', (p_group).name,
                   v_pipeline.driver, v_pipeline.epoch, p_epoch),
            'A newer driver has taken over: stop this one, or start it again to take over in turn.');
    END IF;
    RETURN v_pipeline;
END $$;

-- Renews the leases of the claim in flight. Returns how many messages they still hold; 0 if there is no claim, or if
-- all of it is lost.
CREATE FUNCTION custody.renew_claim(p_group_id int, p_visibility interval, p_now timestamptz) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_part record;
    v_held bigint := 0;
BEGIN
    FOR v_part IN SELECT lease_id FROM custody.pipeline_parts WHERE group_id = p_group_id ORDER BY partition LOOP
        IF (custody.extend(v_part.lease_id, p_visibility, NULL, p_now)).deadline IS NOT NULL THEN
            SELECT v_held + coalesce(sum(remaining), 0) INTO v_held FROM custody.leases
            WHERE lease_id = v_part.lease_id;
        END IF;
    END LOOP;
    RETURN v_held;
END $$;

-- Takes over a pipeline: a new epoch, and the claim that the last driver had in flight. until and due: the end of a
-- pass over what is there now. With p_after only if that epoch still drives it: a driver that restarts must not replace
-- a newer one.
CREATE FUNCTION custody.start_pipeline(
    p_topic text, p_group text, p_driver text, p_visibility interval DEFAULT NULL, p_after bigint DEFAULT NULL,
    p_now timestamptz DEFAULT NULL
) RETURNS TABLE (group_id int, epoch bigint, uid uuid, claim bigint, until bigint[], due timestamptz)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_now   timestamptz;
    v_head  custody.heads;
BEGIN
    PERFORM custody.require_read_committed();
    IF p_after IS NOT NULL THEN
        PERFORM custody.driven_by(v_group, p_after);
    END IF;
    INSERT INTO custody.pipelines AS p (group_id, epoch, driver, started_at)
    VALUES (v_group.group_id, nextval('custody.epochs'), p_driver, coalesce(p_now, clock_timestamp()))
    ON CONFLICT ON CONSTRAINT pipelines_pkey DO UPDATE SET epoch = nextval('custody.epochs'), driver = excluded.driver,
        started_at = excluded.started_at
    RETURNING p.group_id, p.epoch, p.uid INTO group_id, epoch, uid;
    v_now := coalesce(p_now, clock_timestamp());
    -- A driver that restarts is still retrying. The tries of an earlier driver do not count.
    INSERT INTO custody.pipeline_reports AS r (group_id, epoch, state, since, tries, seen_at)
    VALUES (v_group.group_id, start_pipeline.epoch, 'running', v_now, 0, v_now)
    ON CONFLICT ON CONSTRAINT pipeline_reports_pkey DO UPDATE
    SET epoch = excluded.epoch, seen_at = excluded.seen_at,
        state = CASE WHEN p_after IS NULL THEN 'running' ELSE r.state END,
        since = CASE WHEN p_after IS NULL THEN v_now ELSE r.since END,
        tries = CASE WHEN p_after IS NULL THEN 0 ELSE r.tries END;
    DELETE FROM custody.malformed m WHERE m.group_id = v_group.group_id;      -- by the schema of the last driver
    PERFORM custody.renew_claim(v_group.group_id, coalesce(p_visibility, v_group.visibility_timeout), p_now);
    SELECT c.claim INTO claim FROM custody.pipeline_claims c WHERE c.group_id = v_group.group_id;
    -- A pass includes what was committed in the outbox before it began.
    FOR v_head IN
        SELECT h.* FROM custody.heads h
        WHERE h.topic_id = v_group.topic_id
          AND EXISTS (SELECT FROM custody.outbox o
                      WHERE o.topic_id = h.topic_id AND o.partition = h.partition AND o.ended_at IS NULL
                      AND o.available_at <= v_now)
        ORDER BY h.partition
    LOOP
        WHILE custody.take_outbox(v_head, v_now, p_window => 1000000000) > 0 LOOP
            NULL;
        END LOOP;
    END LOOP;
    SELECT array_agg((custody.tail(h)).next_offset ORDER BY h.partition) INTO until FROM custody.heads h
    WHERE h.topic_id = v_group.topic_id;
    due := v_now;
    RETURN NEXT;
END $$;

-- The claim in flight, with its leases renewed; else a new one over every partition that has something to give, up to
-- p_max messages in all. If there is none, `reason` says why, and due_in in how many seconds there may be something.
-- `passed`: no bound message among those scanned; claim again at once.
CREATE FUNCTION custody.claim_batch(
    p_topic text, p_group text, p_epoch bigint, p_max int, p_visibility interval DEFAULT NULL,
    p_worker text DEFAULT NULL, p_until bigint[] DEFAULT NULL, p_due timestamptz DEFAULT NULL,
    p_now timestamptz DEFAULT NULL
) RETURNS TABLE (claim bigint, messages bigint, reason text, due_in double precision)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_group      custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_pipeline   custody.pipelines := custody.driven_by(v_group, p_epoch);
    v_visibility interval := coalesce(p_visibility, v_group.visibility_timeout);
    v_now        timestamptz := coalesce(p_now, clock_timestamp());
    v_flight     custody.pipeline_claims;
    v_candidates int[];
    v_limit      interval := (SELECT t.starvation_limit FROM custody.topics t WHERE t.topic_id = v_group.topic_id);
    v_shares     double precision[];
    v_partition  int;
    v_left       int;
    v_share      int;
    v_head       custody.heads;
    v_found      record;
    v_binding    int;
    v_look       bigint := greatest(10000, p_max);
    v_stop       timestamptz := clock_timestamp() + interval '500 ms';
    v_passed     boolean := false;
BEGIN
    messages := 0;
    SELECT * INTO v_flight FROM custody.pipeline_claims c WHERE c.group_id = v_group.group_id;
    IF FOUND THEN
        messages := custody.renew_claim(v_group.group_id, v_visibility, p_now);
        IF messages > 0 THEN
            claim := v_flight.claim;
            RETURN NEXT;
            RETURN;
        END IF;
        PERFORM custody.forget_claim(v_group.group_id);     -- all of it was lost: it comes back by itself
        v_now := coalesce(p_now, clock_timestamp());        -- this may have waited for its leases
    END IF;
    IF v_group.paused_at IS NOT NULL THEN
        reason := 'paused';
        RETURN NEXT;
        RETURN;
    ELSIF v_group.breaker_state <> 'closed' THEN
        p_max := custody.breaker_allows(v_group.group_id, p_max, v_now);
        IF p_max = 0 THEN
            reason := 'breaker_open';
            due_in := custody.next_due(p_topic, p_group, p_now);
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    IF v_limit IS NOT NULL THEN
        SELECT * INTO v_candidates, v_shares FROM custody.shares_by_priority(v_group, v_limit, v_now);
    ELSE
        -- The partitions with least to give come first, so that the others get what they leave of their share. If there
        -- are more partitions than messages are wanted, the order is random.
        SELECT array_agg(x.p ORDER BY CASE WHEN p_max < x.candidates THEN random() ELSE x.fresh END) INTO v_candidates
        FROM (SELECT p, (custody.tail(h)).next_offset - (custody.position(v_group.group_id, p)).frontier AS fresh,
                     count(*) OVER () AS candidates
              FROM unnest(custody.claim_candidates(v_group, v_now)) p
              JOIN custody.heads h ON h.topic_id = v_group.topic_id AND h.partition = p) x;
    END IF;
    reason := 'empty';
    SELECT false AS heads_held, NULL::custody.death[] AS died INTO v_found;
    v_left := cardinality(v_candidates);
    FOREACH v_partition IN ARRAY coalesce(v_candidates, '{}') LOOP
        SELECT c.binding_no INTO v_binding FROM custody.cursors c
        WHERE c.group_id = v_group.group_id AND c.partition = v_partition FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            reason := 'busy';
            v_left := v_left - 1;
            CONTINUE;
        END IF;
        IF v_binding <> v_group.binding_no THEN      -- the group was bound anew since it was read
            SELECT g.matcher, g.binding_no, g.fairness INTO v_group.matcher, v_group.binding_no, v_group.fairness
                FROM custody.groups g WHERE g.group_id = v_group.group_id;
        END IF;
        SELECT h.* INTO v_head FROM custody.heads h WHERE h.topic_id = v_group.topic_id AND h.partition = v_partition;
        -- A partition that was added since has nothing for a pass that began before.
        v_share := CASE WHEN v_shares IS NULL THEN (p_max - messages) / v_left
                        ELSE floor((p_max - messages) * v_shares[cardinality(v_candidates) - v_left + 1]) END;
        v_found := custody.claim_partition(v_group, v_head, greatest(1, v_share), v_visibility, p_worker, v_now,
                                           CASE WHEN p_until IS NOT NULL THEN coalesce(p_until[v_partition + 1], 0) END,
                                           p_due, greatest(1, v_look / v_left), v_stop, v_found.heads_held,
                                           v_found.died);
        v_left := v_left - 1;
        v_look := v_look - v_found.looked;
        v_passed := v_passed OR v_found.reason = 'passed';
        EXIT WHEN v_found.heads_held AND v_group.matcher IS NOT NULL;       -- nothing is matched under a head
        IF v_found.reason IS NOT NULL THEN
            IF v_found.reason <> 'empty' THEN
                reason := v_found.reason;
            END IF;
            CONTINUE;
        END IF;
        IF claim IS NULL THEN
            UPDATE custody.pipelines p SET last_claim = p.last_claim + 1 WHERE p.group_id = v_group.group_id
            RETURNING p.last_claim INTO claim;
            INSERT INTO custody.pipeline_claims
            VALUES (v_group.group_id, claim, custody.open_stage(format('staged_%s_%s', v_group.group_id, claim), v_now),
                    v_now);
        END IF;
        UPDATE custody.leases l SET size = 0 WHERE l.lease_id = (v_found.lease).lease_id;
        INSERT INTO custody.pipeline_parts
        VALUES (v_group.group_id, v_partition, (v_found.lease).lease_id, (v_found.lease).held, (v_found.lease).size);
        messages := messages + (v_found.lease).size;
        IF v_group.breaker_state <> 'closed' THEN
            PERFORM custody.breaker_probes(v_group.group_id, (v_found.lease).lease_id, (v_found.lease).deadline);
        END IF;
        EXIT WHEN messages >= p_max;
    END LOOP;
    IF v_found.died IS NOT NULL THEN
        PERFORM custody.copy_dead(v_group, v_found.died, p_now);
        -- This may have waited for heads, so the visibility timeout begins now.
        UPDATE custody.leases l SET deadline = coalesce(p_now, clock_timestamp()) + v_visibility
        FROM custody.pipeline_parts p WHERE p.group_id = v_group.group_id AND l.lease_id = p.lease_id;
    END IF;
    IF claim IS NOT NULL THEN
        reason := NULL;
    ELSIF v_passed THEN
        reason := 'passed';
    ELSE
        due_in := custody.next_due(p_topic, p_group, p_now);
    END IF;
    RETURN NEXT;
END $$;

CREATE FUNCTION custody.forget_claim(p_group_id int) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_claim custody.pipeline_claims;
BEGIN
    DELETE FROM custody.pipeline_claims WHERE group_id = p_group_id RETURNING * INTO v_claim;
    DELETE FROM custody.suspects WHERE group_id = p_group_id AND claim = v_claim.claim;
    DELETE FROM custody.overdue WHERE group_id = p_group_id AND claim = v_claim.claim;
    DELETE FROM custody.malformed WHERE group_id = p_group_id AND claim = v_claim.claim;
END $$;

-- Keeps the claim of this epoch alive while its batch runs. Returns what its leases still hold.
CREATE FUNCTION custody.keep_claim(
    p_topic text, p_group text, p_epoch bigint, p_visibility interval DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_group    custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_pipeline custody.pipelines := custody.driven_by(v_group, p_epoch);
BEGIN
    RETURN custody.renew_claim(v_pipeline.group_id, coalesce(p_visibility, v_group.visibility_timeout), p_now);
END $$;

-- Gives back a claim that will not be run: it is ready at once, and the delivery does not count. Returns false if there
-- was none.
CREATE FUNCTION custody.release_claim(
    p_topic text, p_group text, p_epoch bigint, p_worker text DEFAULT NULL, p_now timestamptz DEFAULT NULL
)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_group    custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_pipeline custody.pipelines := custody.driven_by(v_group, p_epoch);
    v_found    boolean := EXISTS (SELECT FROM custody.pipeline_claims c WHERE c.group_id = v_group.group_id);
BEGIN
    PERFORM custody.release_rest(p.lease_id, p_worker, p_now)
    FROM (SELECT lease_id FROM custody.pipeline_parts WHERE group_id = v_pipeline.group_id ORDER BY partition) p;
    PERFORM custody.forget_claim(v_group.group_id);
    RETURN v_found;
END $$;

-- Gives back what a lease still holds. Returns the number of messages.
CREATE FUNCTION custody.release_rest(p_lease_id uuid, p_worker text, p_now timestamptz) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_offsets bigint[] := custody.lease_offsets(p_lease_id, p_now);
BEGIN
    IF cardinality(v_offsets) = 0 THEN
        RETURN 0;
    END IF;
    RETURN (custody.settle(p_lease_id, v_offsets, array_fill('release'::text, ARRAY[cardinality(v_offsets)]),
                           p_worker => p_worker, p_now => p_now)).settled;
END $$;

-- The number of the claim in flight; null if there is none.
CREATE FUNCTION custody.claim_in_flight(p_group_id int) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT c.claim FROM custody.pipeline_claims c WHERE c.group_id = p_group_id
$$;

-- What a claim took of each partition. Nothing if it is not in flight any more (it was committed, or came back).
CREATE FUNCTION custody.claimed(p_group_id int, p_claim bigint)
RETURNS TABLE (partition int, ranges int8multirange, messages int)
LANGUAGE sql STABLE AS $$
    SELECT p.partition, p.held, p.messages
    FROM custody.pipeline_claims c JOIN custody.pipeline_parts p USING (group_id)
    WHERE c.group_id = p_group_id AND c.claim = p_claim ORDER BY p.partition
$$;

-- For how many seconds the leases still hold all that they have of a partition of the claim; null if they hold nothing
-- of it.
CREATE FUNCTION custody.claim_left(p_group_id int, p_claim bigint, p_partition int, p_now timestamptz DEFAULT NULL)
RETURNS double precision
LANGUAGE sql VOLATILE AS $$
    SELECT extract(epoch FROM min(l.deadline) - coalesce(p_now, clock_timestamp()))::double precision
    FROM custody.pipeline_claims c JOIN custody.pipeline_parts p USING (group_id) JOIN custody.leases l USING (lease_id)
    WHERE c.group_id = p_group_id AND c.claim = p_claim AND p.partition = p_partition
      AND l.deadline > coalesce(p_now, clock_timestamp())
$$;

-- Where the messages of a claim are, for one partition: see custody.segments_over.
CREATE FUNCTION custody.claim_reads(p_group_id int, p_claim bigint, p_partition int)
RETURNS TABLE (source text, from_offset bigint, until_offset bigint)
LANGUAGE sql STABLE AS $$
    SELECT custody.plain_source(s.source, p_partition, s.from_offset, s.until_offset, s.until_offset), s.from_offset,
           s.until_offset
    FROM custody.claimed(p_group_id, p_claim) p
    JOIN custody.groups g ON g.group_id = p_group_id
    JOIN custody.heads h ON h.topic_id = g.topic_id AND h.partition = p.partition,
         LATERAL custody.segments_over(h, lower(p.ranges), upper(p.ranges)) s
    WHERE p.partition = p_partition
$$;

-- The messages of a claim that were delivered before, for one partition. All others are at their first attempt.
CREATE FUNCTION custody.claim_attempts(p_group_id int, p_claim bigint, p_partition int)
RETURNS TABLE (ranges int8multirange, attempt int, first_delivery timestamptz, last_error text)
LANGUAGE sql STABLE AS $$
    SELECT l.held, l.attempt, l.first_delivery, l.last_error
    FROM custody.pipeline_claims c JOIN custody.pipeline_parts p USING (group_id) JOIN custody.leases l USING (lease_id)
    WHERE c.group_id = p_group_id AND c.claim = p_claim AND p.partition = p_partition
      AND NOT l.of_cases AND (l.attempt <> 1 OR l.first_delivery IS NOT NULL)
    UNION ALL
    SELECT int8multirange(int8range(s."offset", s."offset" + 1)), s.attempts, s.first_delivery, s.last_error
    FROM custody.pipeline_claims c JOIN custody.pipeline_parts p USING (group_id)
    JOIN custody.leases l USING (lease_id),
         unnest(l.held) r
    JOIN custody.cases s ON s.group_id = p_group_id AND s.partition = p_partition AND s."offset" >= lower(r)
        AND s."offset" < upper(r)
    WHERE c.group_id = p_group_id AND c.claim = p_claim AND p.partition = p_partition AND l.of_cases
$$;

-- The messages of a claim by key and offset: a part of this list can be run apart from the rest.
CREATE FUNCTION custody.claim_by_key(p_group_id int, p_claim bigint) RETURNS TABLE (partition int, "offset" bigint)
LANGUAGE sql STABLE AS $$
    SELECT p.partition, k."offset"
    FROM custody.claimed(p_group_id, p_claim) p
    JOIN custody.groups g ON g.group_id = p_group_id
    JOIN custody.heads h ON h.topic_id = g.topic_id AND h.partition = p.partition,
         LATERAL custody.keys_of(h, p.ranges) k
    ORDER BY k.key, p.partition, k."offset"
$$;

-- Called before a task runs these messages again after an attempt that died. The last note tells which message ended
-- it.
CREATE FUNCTION custody.note_suspect(
    p_group_id int, p_claim bigint, p_attempt bigint, p_partition int, p_offset bigint, p_size int
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO custody.suspects (group_id, claim, attempt, partition, "offset", size)
    VALUES (p_group_id, p_claim, p_attempt, p_partition, p_offset, p_size)
$$;

-- Records a message that does not fit the schema of its pipeline, and that is not handed to it.
CREATE FUNCTION custody.note_malformed(
    p_group_id int, p_claim bigint, p_partitions int[], p_offsets bigint[], p_errors text[]
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO custody.malformed SELECT p_group_id, p_claim, x.p, x.o, x.e
    FROM unnest(p_partitions, p_offsets, p_errors) x (p, o, e)
    ON CONFLICT DO NOTHING
$$;

-- The last note of each attempt that did not end.
CREATE FUNCTION custody.suspected(p_group_id int, p_claim bigint)
RETURNS TABLE (partition int, "offset" bigint, size int)
LANGUAGE sql STABLE AS $$
    SELECT x.partition, x."offset", x.size
    FROM (SELECT DISTINCT ON (s.attempt) s.* FROM custody.suspects s
          WHERE s.group_id = p_group_id AND s.claim = p_claim ORDER BY s.attempt, s.suspect_id DESC) x
    WHERE x.size > 0
$$;

-- Records that a handler has been running for so many seconds on this message; null: it has ended. p_stopped: its
-- process is about to be killed, and the message fails when the claim is run again.
CREATE FUNCTION custody.note_overdue(
    p_group_id int, p_claim bigint, p_partition int, p_offset bigint, p_seconds double precision, p_stopped boolean,
    p_now timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE sql AS $$
    DELETE FROM custody.overdue o
    WHERE p_seconds IS NULL AND NOT o.stopped
      AND (o.group_id, o.claim, o.partition, o."offset") = (p_group_id, p_claim, p_partition, p_offset);
    INSERT INTO custody.overdue AS o
    SELECT p_group_id, p_claim, p_partition, p_offset,
           coalesce(p_now, clock_timestamp()) - make_interval(secs => p_seconds), p_stopped
    WHERE p_seconds IS NOT NULL
      AND EXISTS (SELECT FROM custody.pipeline_claims c WHERE c.group_id = p_group_id AND c.claim = p_claim)
    ON CONFLICT (group_id, claim, partition, "offset") DO UPDATE
        SET since = excluded.since, stopped = o.stopped OR excluded.stopped
$$;

-- What the watchdogs have recorded of a claim, the longest first. Without p_claim it is the claim in flight.
CREATE FUNCTION custody.overdue(p_group_id int, p_claim bigint DEFAULT NULL, p_now timestamptz DEFAULT NULL)
RETURNS TABLE (partition int, "offset" bigint, seconds double precision, stopped boolean)
LANGUAGE sql STABLE AS $$
    SELECT o.partition, o."offset", extract(epoch FROM coalesce(p_now, clock_timestamp()) - o.since)::double precision,
           o.stopped
    FROM custody.overdue o WHERE o.group_id = p_group_id AND o.claim = coalesce(p_claim, o.claim) ORDER BY o.since
$$;

-- The driver of this epoch reports that it is alive, and the state of its pipeline. Arguments that are left out change
-- nothing. A report may be repeated.
CREATE FUNCTION custody.report_pipeline(
    p_topic text, p_group text, p_epoch bigint, p_state text DEFAULT NULL, p_tries int DEFAULT NULL,
    p_error text DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
BEGIN
    UPDATE custody.pipeline_reports r
    SET seen_at = v_now, state = coalesce(p_state, r.state), tries = coalesce(p_tries, r.tries),
        last_error = coalesce(p_error, r.last_error), since = CASE WHEN p_state <> r.state THEN v_now ELSE r.since END,
        error_at = CASE WHEN p_error IS NOT NULL
                        AND (p_error IS DISTINCT FROM r.last_error OR p_tries > r.tries) THEN v_now ELSE r.error_at END
    WHERE r.group_id = v_group.group_id AND r.epoch = p_epoch;
    IF NOT FOUND THEN
        PERFORM custody.driven_by(v_group, p_epoch);
    END IF;
END $$;

-- The state of all pipelines: running; retrying (it failed and is tried again: tries, last_error); stopped; failed (it
-- has given up, or cannot be run); gone (its driver was running and has not reported for 20 seconds).
CREATE FUNCTION custody.pipeline_states(
    p_topic text DEFAULT NULL, p_group text DEFAULT NULL, p_now timestamptz DEFAULT NULL
)
RETURNS TABLE (
    topic text, consumer_group text, state text, since timestamptz, for_seconds double precision, tries int,
    last_error text, error_at timestamptz, seen_at timestamptz, seen_seconds double precision, driver text,
    epoch bigint, started_at timestamptz,
    claim bigint, claimed_at timestamptz, messages bigint
)
LANGUAGE sql STABLE AS $$
    SELECT t.name, g.name, s.state, s.since, extract(epoch FROM greatest(s.now - s.since, '0'))::double precision,
           s.tries, s.last_error, s.error_at, s.seen_at,
           extract(epoch FROM greatest(s.now - s.seen_at, '0'))::double precision, p.driver, p.epoch, p.started_at,
           c.claim, c.claimed_at,
           (SELECT sum(x.messages)::bigint FROM custody.pipeline_parts x WHERE x.group_id = p.group_id)
    FROM custody.pipelines p JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
    LEFT JOIN custody.pipeline_claims c USING (group_id),
         LATERAL (SELECT r.*, n.now, r.state IN ('running', 'retrying')
                  AND r.seen_at < n.now - interval '20 s' AS silent
                  FROM custody.pipeline_reports r, (SELECT coalesce(p_now, clock_timestamp()) AS now) n
                  WHERE r.group_id = p.group_id) q,
         LATERAL (SELECT CASE WHEN q.silent THEN 'gone' ELSE q.state END AS state,
                         CASE WHEN q.silent THEN q.seen_at ELSE q.since END AS since, q.tries, q.last_error, q.error_at,
                         q.seen_at, q.now) s
    WHERE t.name = coalesce(p_topic, t.name) AND g.name = coalesce(p_group, g.name)
    ORDER BY t.name, g.name
$$;

CREATE VIEW custody.pipeline_state AS SELECT * FROM custody.pipeline_states();

-- The counts of a batch.
CREATE FUNCTION custody.counts_of(p_batch custody.pipeline_batches) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT to_jsonb(p_batch) - '{group_id, claim, epoch, driver, query_id, batch_id, claimed_at, committed_at}'::text[]
$$;

-- The figures of a pipeline in one row: the state of its group, and the result of its last batch.
CREATE FUNCTION custody.pipeline_figures(p_topic text, p_group text, p_now timestamptz DEFAULT NULL)
RETURNS TABLE (
    lag bigint, waiting bigint, in_flight bigint, parked bigint, dead bigint, blocked_keys bigint, bound boolean,
    last_claim bigint, last jsonb
)
LANGUAGE sql STABLE AS $$
    SELECT s.lag, s.waiting, s.in_flight, s.parked, s.dead,
           (SELECT count(*) FROM (
                SELECT c.partition, c.key FROM custody.cases c
                WHERE c.group_id = g.group_id AND c.key IS NOT NULL AND (c.state <> 'dead' OR c.held)
                  AND g.ordering = 'key'
                UNION
                SELECT p.partition, p.key FROM custody.parked p WHERE p.group_id = g.group_id) k),
           g.bindings IS NOT NULL, b.claim, b.counts
    FROM custody.group_named(p_topic, p_group) g
    CROSS JOIN LATERAL (
        SELECT sum(x.lag)::bigint AS lag, sum(x.waiting)::bigint AS waiting, sum(x.in_flight)::bigint AS in_flight,
               sum(x.parked)::bigint AS parked, sum(x.dead)::bigint AS dead
        FROM custody.partition_stats(p_topic, p_group, p_now) x) s
    LEFT JOIN LATERAL (
        SELECT x.claim, custody.counts_of(x) AS counts FROM custody.pipeline_batches x
        WHERE x.group_id = g.group_id ORDER BY x.claim DESC LIMIT 1) b ON true
$$;
