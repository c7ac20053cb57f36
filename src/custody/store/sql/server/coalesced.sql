-- Requests of many callers in one transaction, with one fsync for all and an answer for each. A refusal rolls back its
-- own request and nothing else. Whether a row is locked is checked before anything is written: unless p_wait, requests
-- whose rows somebody holds are answered `blocked`, and nothing was done for them. So a partition that is locked for
-- long stops only those who publish to it.

-- One row for each message of a request that succeeded. One row with a code for each request that did not, which
-- overrides other rows of the same request. A request is one unit, or several that succeed or fail together: messages
-- of one topic, delayed or not.
CREATE FUNCTION custody.publish_each(
    p_requests int[], p_topics text[], p_delayed boolean[], p_producers text[], p_epochs int[], p_sequences bigint[],
    -- of each unit; the units of a request are neighbours
    p_expected bigint[], p_of int[], p_priorities boolean[],
    p_units int[], p_partitions int[], p_keys text[], p_kinds text[], p_payloads bytea[], p_headers text[],
    p_deliver_at timestamptz[], p_delays double precision[],              -- of each message, by unit (from 1 on)
    p_wait boolean DEFAULT true, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (
    request int, partition int, number bigint, duplicate boolean, deliver_at timestamptz, code text, message text,
    remedy text
)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_producers text[];
    v_heads     text[];
    v_blocked   int[] := '{}';
    v_request   record;
    v_unit      record;
BEGIN
    PERFORM custody.require_read_committed();
    -- All locks before the first request takes its own. Whoever waits for them takes them in the order of kinds and
    -- keys.
    IF p_wait THEN
        PERFORM FROM custody.producers p WHERE p.producer_id = ANY (p_producers) ORDER BY p.producer_id FOR UPDATE;
        PERFORM FROM custody.heads h, custody.units_heads(p_topics, p_units, p_partitions) w
        WHERE h.topic_id = w.topic_id AND h.partition = w.partition ORDER BY h.topic_id, h.partition FOR UPDATE OF h;
    ELSE
        SELECT array_agg(x.producer_id) INTO v_producers FROM (
            SELECT p.producer_id FROM custody.producers p WHERE p.producer_id = ANY (p_producers)
            FOR UPDATE SKIP LOCKED) x;
        SELECT array_agg(x.head) INTO v_heads FROM (
            SELECT h.topic_id || '/' || h.partition AS head
            FROM custody.heads h, custody.units_heads(p_topics, p_units, p_partitions) w
            WHERE h.topic_id = w.topic_id AND h.partition = w.partition FOR UPDATE OF h SKIP LOCKED) x;
        SELECT coalesce(array_agg(DISTINCT p_requests[b.unit]), '{}') INTO v_blocked
        FROM (
            SELECT w.unit FROM custody.heads h, custody.units_heads(p_topics, p_units, p_partitions, true) w
            WHERE h.topic_id = w.topic_id AND h.partition = w.partition
            AND h.topic_id || '/' || h.partition <> ALL (coalesce(v_heads, '{}'))
            UNION ALL
            SELECT u.unit FROM custody.producers p, unnest(p_producers) WITH ORDINALITY u (producer_id, unit)
            WHERE p.producer_id = u.producer_id AND p.producer_id <> ALL (coalesce(v_producers, '{}'))) b;
    END IF;
    FOR v_request IN
        SELECT r.no, min(r.unit)::int AS first, max(r.unit)::int AS last
        FROM unnest(p_requests) WITH ORDINALITY r (no, unit) GROUP BY r.no ORDER BY r.no
    LOOP
        IF v_request.no = ANY (v_blocked) THEN
            RETURN QUERY SELECT v_request.no, NULL::int, NULL::bigint, NULL::boolean, NULL::timestamptz, 'blocked',
                NULL::text, NULL::text;
            CONTINUE;
        END IF;
        BEGIN
            FOR v_unit IN
                SELECT u.unit, min(m.n)::int AS a, max(m.n)::int AS z
                FROM generate_series(v_request.first, v_request.last) u (unit)
                JOIN unnest(p_units) WITH ORDINALITY m (unit, n) ON m.unit = u.unit
                GROUP BY u.unit ORDER BY u.unit
            LOOP
                IF p_delayed[v_unit.unit] THEN
                    RETURN QUERY
                    SELECT v_request.no, d.partition, d.delay_id, d.duplicate, d.deliver_at, NULL::text, NULL::text,
                           NULL::text
                    FROM custody.publish_delayed(
                        p_topics[v_unit.unit], p_partitions[v_unit.a:v_unit.z], p_keys[v_unit.a:v_unit.z],
                        p_kinds[v_unit.a:v_unit.z], p_payloads[v_unit.a:v_unit.z], p_headers[v_unit.a:v_unit.z],
                        p_deliver_at[v_unit.a:v_unit.z], p_delays[v_unit.a:v_unit.z],
                        p_producers[v_unit.unit], p_epochs[v_unit.unit], p_sequences[v_unit.unit], p_now,
                        p_of[v_unit.unit]) d;
                ELSE
                    RETURN QUERY
                    SELECT v_request.no, m.partition, m."offset", m.duplicate, NULL::timestamptz, NULL::text,
                           NULL::text, NULL::text
                    FROM custody.publish(
                        p_topics[v_unit.unit], p_partitions[v_unit.a:v_unit.z], p_keys[v_unit.a:v_unit.z],
                        p_kinds[v_unit.a:v_unit.z], p_payloads[v_unit.a:v_unit.z], p_headers[v_unit.a:v_unit.z],
                        p_producers[v_unit.unit], p_epochs[v_unit.unit], p_sequences[v_unit.unit],
                        p_expected[v_unit.unit], p_now, p_of[v_unit.unit], p_priorities[v_unit.unit]) m;
                END IF;
            END LOOP;
        EXCEPTION WHEN SQLSTATE 'CY000' OR data_exception OR integrity_constraint_violation THEN
            GET STACKED DIAGNOSTICS code = PG_EXCEPTION_DETAIL, message = MESSAGE_TEXT, remedy = PG_EXCEPTION_HINT;
            RETURN QUERY SELECT v_request.no, NULL::int, NULL::bigint, NULL::boolean, NULL::timestamptz,
                                CASE WHEN SQLSTATE = 'CY000' THEN code ELSE 'invalid_argument' END, message, remedy;
        END;
    END LOOP;
END $$;

-- The heads of these units of messages, each once, or once for each unit.
CREATE FUNCTION custody.units_heads(p_topics text[], p_units int[], p_partitions int[], p_each boolean DEFAULT false)
RETURNS TABLE (topic_id int, partition int, unit int)
LANGUAGE sql STABLE AS $$
    SELECT t.topic_id, m.partition, CASE WHEN p_each THEN m.unit END
    FROM unnest(p_units, p_partitions) m (unit, partition) JOIN custody.topics t ON t.name = p_topics[m.unit]
    GROUP BY 1, 2, 3
$$;

-- One row for each request: what it settled, what was lost, whether some was settled before, or the code of its
-- refusal. Its offsets are those from p_first to p_last of p_offsets; without bounds all of the lease that are not
-- settled. A lease of another topic or partition than the named one does not hold these offsets. Without a lease it is
-- the one that holds the message now.
CREATE FUNCTION custody.ack_each(
    p_leases uuid[], p_first int[], p_last int[], p_offsets bigint[], p_topics text[], p_groups text[],
    p_partitions int[], p_workers text[], p_wait boolean DEFAULT true, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (request int, settled bigint, lost bigint[], already boolean, code text, message text, remedy text)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_leases uuid[] := p_leases;
    v_over   boolean[] := array_fill(false, ARRAY[cardinality(p_leases)]);
    v_locked text[];      -- lease and part
    v_named  bigint[];
    v_result custody.settled;
BEGIN
    PERFORM custody.require_read_committed();
    FOR i IN 1..cardinality(p_leases) LOOP
        CONTINUE WHEN v_leases[i] IS NOT NULL;
        BEGIN
            v_leases[i] := custody.live_lease(p_topics[i], p_groups[i], p_partitions[i], p_offsets[p_first[i]], p_now);
        EXCEPTION WHEN SQLSTATE 'CY000' OR data_exception OR integrity_constraint_violation THEN
            GET STACKED DIAGNOSTICS code = PG_EXCEPTION_DETAIL, message = MESSAGE_TEXT, remedy = PG_EXCEPTION_HINT;
            v_over[i] := true;
            RETURN QUERY SELECT i, NULL::bigint, NULL::bigint[], NULL::boolean,
                                CASE WHEN SQLSTATE = 'CY000' THEN code ELSE 'invalid_argument' END, message, remedy;
        END;
    END LOOP;
    IF p_wait THEN
        PERFORM FROM custody.leases l WHERE l.lease_id = ANY (v_leases) ORDER BY l.group_id, l.partition, l.claim_no,
            l.part FOR UPDATE;
    ELSE
        SELECT array_agg(x.row) INTO v_locked FROM (
            SELECT l.lease_id || '/' || l.part AS row FROM custody.leases l WHERE l.lease_id = ANY (v_leases)
            FOR UPDATE SKIP LOCKED) x;
    END IF;
    FOR request, settled IN
        SELECT a.request, a.settled
        FROM custody.ack_free(v_leases, p_first, p_last, p_offsets, p_topics, p_partitions, p_workers, v_locked, p_wait,
                              p_now) a
    LOOP
        v_over[request] := true;
        lost := '{}';
        already := false;
        RETURN NEXT;
    END LOOP;
    FOR i IN 1..cardinality(p_leases) LOOP
        CONTINUE WHEN v_over[i];
        -- Somebody may hold a part of a lease: a rewind locks only what it takes from.
        IF NOT p_wait AND EXISTS (
            SELECT FROM custody.leases l
            WHERE l.lease_id = v_leases[i] AND l.lease_id || '/' || l.part <> ALL (coalesce(v_locked, '{}')))
        THEN
            RETURN QUERY SELECT i, NULL::bigint, NULL::bigint[], NULL::boolean, 'blocked', NULL::text, NULL::text;
            CONTINUE;
        END IF;
        BEGIN
            v_named := p_offsets[p_first[i]:p_last[i]];
            IF (p_topics[i] IS NOT NULL OR p_partitions[i] IS NOT NULL) AND p_leases[i] IS NOT NULL
                AND NOT custody.lease_is_of(v_leases[i], p_topics[i], p_partitions[i])
            THEN
                v_result := ROW(0, coalesce(v_named, '{}'), '{}', '{}', '{}');
            ELSIF p_first[i] IS NULL OR EXISTS (
                SELECT FROM custody.leases l
                WHERE l.lease_id = v_leases[i] AND l.remaining + l.settled = l.size AND NOT l.of_cases
                AND l.held = custody.offsets_set(v_named) AND l.deadline > coalesce(p_now, clock_timestamp()))
            THEN
                v_result := custody.ack_lease(v_leases[i], p_workers[i], p_now);      -- one statement
            ELSE
                v_result := custody.settle(v_leases[i], '{}', '{}', p_worker => p_workers[i], p_now => p_now,
                                           p_acked => custody.offsets_set(v_named));
            END IF;
            RETURN QUERY SELECT i, v_result.settled, v_result.lost, cardinality(v_result.already) > 0, NULL::text,
                NULL::text, NULL::text;
        EXCEPTION WHEN SQLSTATE 'CY000' OR data_exception OR integrity_constraint_violation THEN
            GET STACKED DIAGNOSTICS code = PG_EXCEPTION_DETAIL, message = MESSAGE_TEXT, remedy = PG_EXCEPTION_HINT;
            RETURN QUERY SELECT i, NULL::bigint, NULL::bigint[], NULL::boolean,
                                CASE WHEN SQLSTATE = 'CY000' THEN code ELSE 'invalid_argument' END, message, remedy;
        END;
    END LOOP;
END $$;

-- Acks leases of which nothing was settled otherwise and which are one row without cases, all in one statement, as
-- ack_lease does for one. The caller has locked the rows in p_locked, with p_wait all of them. One row for each request
-- that is done; the others take a longer way.
CREATE FUNCTION custody.ack_free(
    p_leases uuid[], p_first int[], p_last int[], p_offsets bigint[], p_topics text[], p_partitions int[],
    p_workers text[], p_locked text[], p_wait boolean, p_now timestamptz
) RETURNS TABLE (request int, settled bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_now constant timestamptz := coalesce(p_now, clock_timestamp());
    v_done   int[];
    v_counts bigint[];
    v_gone   uuid[];
    v_groups int[];
BEGIN
    WITH wanted AS (
        SELECT r.lease_id, min(r.n)::int AS n
        FROM unnest(p_leases) WITH ORDINALITY r (lease_id, n)
        WHERE p_topics[r.n] IS NULL AND p_partitions[r.n] IS NULL
        GROUP BY r.lease_id
    ), gone AS (
        DELETE FROM custody.leases l USING wanted w
        WHERE l.lease_id = w.lease_id AND l.remaining + l.settled = l.size AND NOT l.of_cases AND l.deadline > v_now
          AND (p_wait OR l.lease_id || '/' || l.part = ANY (p_locked))
          AND (p_first[w.n] IS NULL OR l.held = custody.offsets_set(p_offsets[p_first[w.n]:p_last[w.n]]))
        RETURNING l.*, w.n
    ), noted AS (
        INSERT INTO custody.journal (at, kind, group_id, partition, lease_id, offsets, worker)
        SELECT v_now, 'ack', g.group_id, g.partition, g.lease_id, g.held, p_workers[g.n] FROM gone g ORDER BY g.n
    )
    SELECT array_agg(g.n), array_agg(g.remaining), array_agg(g.lease_id), array_agg(DISTINCT g.group_id)
    INTO v_done, v_counts, v_gone, v_groups FROM gone g;
    PERFORM custody.breaker_settled(g, g.probe_lease, true, false, v_now)
    FROM custody.groups g
    WHERE g.group_id = ANY (v_groups) AND g.breaker_state = 'probing' AND g.probe_lease = ANY (v_gone);
    RETURN QUERY SELECT d.n, d.count FROM unnest(v_done, v_counts) d (n, count);
END $$;

-- False if the lease is of another topic or partition; null means any.
CREATE FUNCTION custody.lease_is_of(p_lease_id uuid, p_topic text, p_partition int) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT NOT EXISTS (SELECT FROM custody.lease_place(p_lease_id) l
                       WHERE l.partition <> p_partition OR l.topic <> p_topic)
$$;

-- The lease that holds a message now: there is at most one. A caller that names neither lease nor receipt may mean a
-- delivery that is over.
CREATE FUNCTION custody.live_lease(
    p_topic text, p_group text, p_partition int, p_offset bigint, p_now timestamptz DEFAULT NULL
)
RETURNS uuid
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_lease uuid;
BEGIN
    PERFORM custody.require_partition(t, p_partition) FROM custody.topics t WHERE t.topic_id = v_group.topic_id;
    SELECT l.lease_id INTO v_lease
    FROM custody.position(v_group.group_id, p_partition) f
    JOIN custody.leases l ON l.group_id = v_group.group_id AND l.partition = p_partition
        AND l.claim_no >= f.oldest_claim
    WHERE l.held @> p_offset AND l.deadline > coalesce(p_now, clock_timestamp());
    IF NOT FOUND THEN
        PERFORM custody.refuse('lease_lost',
            format('%s/%s: no lease of group %L holds offset %s', p_topic, p_partition, p_group, p_offset),
            'It was settled before, or its lease has expired: receive it again. '
            'With its receipt a repeat is told from a loss.',
            ARRAY[p_offset]);
    END IF;
    RETURN v_lease;
END $$;

-- What is in flight on each partition, over all groups or for one of them.
CREATE FUNCTION custody.in_flight_figures(p_topic text, p_group text DEFAULT NULL, p_now timestamptz DEFAULT NULL)
RETURNS TABLE (partition int, messages bigint, oldest_age double precision)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
BEGIN
    IF p_group IS NOT NULL THEN
        PERFORM custody.lifecycle_group(p_topic, p_group);
    END IF;
    RETURN QUERY
    SELECT h.partition, coalesce(sum(l.remaining), 0)::bigint,
           extract(epoch FROM v_now - min(l.claimed_at))::double precision
    FROM custody.heads h
    LEFT JOIN custody.groups g ON g.topic_id = h.topic_id AND NOT g.bare AND g.name = coalesce(p_group, g.name)
    LEFT JOIN LATERAL (
        SELECT x.remaining, x.claimed_at FROM custody.position(g.group_id, h.partition) f
        JOIN custody.leases x ON x.group_id = g.group_id AND x.partition = h.partition AND x.claim_no >= f.oldest_claim
        WHERE x.deadline > v_now) l ON true
    WHERE h.topic_id = v_topic.topic_id GROUP BY h.partition ORDER BY h.partition;
END $$;
