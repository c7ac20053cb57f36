-- The steps of settle, one for each outcome. The rows of the lease are locked, so its messages belong to the caller.

-- Order within a lease: which messages have to leave it because an earlier one of their key failed. Refuses to resolve
-- a message before an earlier one of its key. `looked` and `looked_keys` are messages whose keys it has read.
CREATE FUNCTION custody.followers(
    p_group custody.groups, p_head custody.heads, p_held int8multirange, p_named int8multirange, p_acked int8multirange,
    p_failed int8multirange, p_stops int8multirange, p_released int8multirange,
    OUT parked bigint[], OUT parked_keys text[], OUT released int8multirange, OUT leaving bigint[],
    OUT looked bigint[], OUT looked_keys text[]
)
LANGUAGE plpgsql AS $$
DECLARE
    v_resolved int8multirange := (p_acked + p_failed) - p_stops;
    v_stay     int8multirange := p_held - p_named;
    v_open     constant int8multirange := p_held - v_resolved;
    v_keys     text[];           -- keys to check; null: all
    v_few      int8multirange;
    v_conflict record;
BEGIN
    parked := '{}';
    parked_keys := '{}';
    released := '{}';
    leaving := '{}';
    -- Messages that are settled in the order of the log, without a stop, cannot conflict.
    IF isempty(p_stops) AND (isempty(v_stay) OR isempty(v_resolved) OR upper(v_resolved) <= lower(v_stay)) THEN
        RETURN;
    END IF;
    -- Only keys matter that have a message which this call does not resolve, and one that it names. If there are few of
    -- either, the others are not looked at.
    IF custody.cardinality(v_open) * 8 < custody.cardinality(p_held) THEN
        v_few := v_open;
    ELSIF custody.cardinality(p_named) * 8 < custody.cardinality(p_held) THEN
        v_few := p_named * p_held;
    END IF;
    IF v_few IS NOT NULL THEN
        SELECT array_agg(k."offset"), array_agg(k.key), array_agg(DISTINCT k.key) FILTER (WHERE k.key IS NOT NULL)
        INTO looked, looked_keys, v_keys FROM custody.keys_of(p_head, v_few) k;
        IF v_keys IS NULL THEN
            RETURN;
        END IF;
    END IF;
    WITH keyed AS MATERIALIZED (
        SELECT k."offset" AS o, k.key AS k FROM custody.keys_of(p_head, p_held, v_keys) k WHERE k.key IS NOT NULL
    ), barred AS MATERIALIZED (
        -- For each key: its first message that this call does not resolve,
        SELECT k, min(o) AS o FROM keyed WHERE NOT v_resolved @> o GROUP BY k
    ), stopped AS MATERIALIZED (
        -- and the first one after which the rest has to leave. If that one is only given back, the rest is given back,
        -- too.
        SELECT DISTINCT ON (k) k, o, p_released @> o AS given_back FROM keyed WHERE p_stops @> o ORDER BY k, o
    )
    SELECT min(m.o) FILTER (WHERE v_resolved @> m.o) AS late, min(b.o) FILTER (WHERE v_resolved @> m.o) AS early,
           array_agg(m.o) FILTER (WHERE v_stay @> m.o AND NOT s.given_back) AS parked,
           array_agg(m.k) FILTER (WHERE v_stay @> m.o AND NOT s.given_back) AS parked_keys,
           range_agg(int8range(m.o, m.o + 1)) FILTER (WHERE v_stay @> m.o AND s.given_back) AS released
    INTO v_conflict
    FROM keyed m
    JOIN barred b ON b.k = m.k AND b.o < m.o
    LEFT JOIN stopped s ON s.k = m.k AND s.o < m.o;
    IF v_conflict.late IS NOT NULL THEN
        PERFORM custody.refuse('order_conflict',
            format('offset %s cannot be resolved before offset %s, an earlier message of its key in the same lease',
                   v_conflict.late, v_conflict.early),
            'Settle the messages of a key in the order of their offsets. Nothing was changed.');
    END IF;
    parked := coalesce(v_conflict.parked, '{}');
    parked_keys := coalesce(v_conflict.parked_keys, '{}');
    released := coalesce(v_conflict.released, '{}');
    leaving := parked || custody.offsets_list(released);
END $$;

CREATE FUNCTION custody.of_cases(p_parts custody.leases[]) RETURNS int8multirange
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(range_agg(p.held), '{}') FROM unnest(p_parts) p WHERE p.of_cases
$$;

CREATE FUNCTION custody.settle_acked(
    p_group custody.groups, p_partition int, p_parts custody.leases[], p_set int8multirange
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_cases int8multirange := p_set * custody.of_cases(p_parts);
BEGIN
    IF isempty(v_cases) THEN
        RETURN;
    END IF;
    WITH closed AS (
        DELETE FROM custody.cases c USING unnest(v_cases) r
        WHERE c.group_id = (p_group).group_id AND c.partition = p_partition AND c."offset" >= lower(r)
          AND c."offset" < upper(r)
        RETURNING c.key, c.failures)
    INSERT INTO custody.freed (group_id, partition, key, most)
    SELECT (p_group).group_id, p_partition, key, custody.comes_back_with(max(failures)) FROM closed
    WHERE key IS NOT NULL AND (p_group).ordering = 'key' GROUP BY key;
END $$;

CREATE FUNCTION custody.settle_failed(
    p_group custody.groups, p_head custody.heads, p_parts custody.leases[], p_set int8multirange, p_lease_id uuid,
    p_offsets bigint[], p_outcomes text[], p_errors text[], p_tracebacks text[], p_delays double precision[],
    p_worker text, p_now timestamptz, p_looked bigint[], p_looked_keys text[]
) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    v_failures custody.failure[];
BEGIN
    IF NOT custody.offsets_set(p_looked) @> p_set THEN
        SELECT array_agg(k."offset"), array_agg(k.key) INTO p_looked, p_looked_keys
        FROM custody.keys_of(p_head, p_set) k;
    END IF;
    SELECT array_agg(ROW(m.o, k.key, p.attempt, coalesce(p.first_delivery, p.claimed_at), custody.kept_error(m.e),
                         custody.kept_traceback(m.t), make_interval(secs => m.d),
                         CASE m.x WHEN 'dead' THEN 'terminal' WHEN 'reject' THEN 'rejected' END)::custody.failure)
    INTO v_failures
    FROM unnest(p_offsets, p_outcomes, p_errors, p_tracebacks, p_delays) m (o, x, e, t, d)
    JOIN unnest(p_looked, p_looked_keys) k (o, key) ON k.o = m.o AND p_set @> m.o
    JOIN unnest(p_parts) p ON p.held @> m.o;
    RETURN custody.charge(p_group, p_head, v_failures, 'max_retries_exceeded', NULL, p_worker, p_lease_id,
                          p_now);
END $$;

-- Later: the message comes back after its delay, and this delivery does not count.
CREATE FUNCTION custody.settle_later(
    p_group custody.groups, p_head custody.heads, p_parts custody.leases[], p_set int8multirange, p_offsets bigint[],
    p_errors text[], p_delays double precision[], p_worker text, p_now timestamptz
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO custody.cases AS c (
        group_id, partition, "offset", key, state, attempts, failures, run_at, first_delivery, last_error, worker,
        updated_at)
    SELECT (p_group).group_id, (p_head).partition, m.o, k.key, 'waiting', greatest(p.attempt - 1, 0), 0,
           p_now + coalesce(make_interval(secs => m.d), (p_group).backoff_initial), p.first_delivery,
           custody.kept_error(m.e), p_worker, p_now
    FROM unnest(p_offsets, p_errors, p_delays) m (o, e, d)
    JOIN custody.keys_of(p_head, p_set) k ON k."offset" = m.o
    JOIN unnest(p_parts) p ON p.held @> m.o
    ON CONFLICT (group_id, partition, "offset") DO UPDATE SET
        state = 'waiting', attempts = c.attempts - 1, run_at = excluded.run_at, lease_cap = NULL,
        worker = excluded.worker, last_error = coalesce(excluded.last_error, c.last_error),
        last_traceback = CASE WHEN excluded.last_error IS NULL THEN c.last_traceback END,
        updated_at = excluded.updated_at
$$;

-- Release: the message is ready again at once, and this delivery does not count.
CREATE FUNCTION custody.settle_released(
    p_group custody.groups, p_partition int, p_parts custody.leases[], p_set int8multirange, p_now timestamptz
)
RETURNS void
LANGUAGE sql AS $$
    UPDATE custody.cases c SET state = 'waiting', attempts = c.attempts - 1, run_at = p_now, updated_at = p_now
    FROM unnest(p_set * custody.of_cases(p_parts)) r
    WHERE c.group_id = (p_group).group_id AND c.partition = p_partition AND c."offset" >= lower(r)
      AND c."offset" < upper(r);
    INSERT INTO custody.returned (group_id, partition, ranges, attempts, first_delivery, last_error, returned_at)
    SELECT (p_group).group_id, p_partition, range_agg(p.held * p_set), p.attempt - 1, p.first_delivery, p.last_error,
           p_now
    FROM unnest(p_parts) p
    WHERE NOT p.of_cases AND p.held && p_set
    GROUP BY p.attempt, p.first_delivery, p.last_error
$$;

-- Later messages of a key whose earlier message failed are parked behind it, and this delivery does not count.
CREATE FUNCTION custody.settle_parked(
    p_group custody.groups, p_partition int, p_parts custody.leases[], p_offsets bigint[], p_keys text[],
    p_now timestamptz
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_part record;
BEGIN
    UPDATE custody.cases c SET state = 'parked', attempts = c.attempts - 1, updated_at = p_now
    WHERE c.group_id = (p_group).group_id AND c.partition = p_partition AND c."offset" = ANY (p_offsets)
      AND custody.of_cases(p_parts) @> c."offset";
    FOR v_part IN
        SELECT p.attempt, p.first_delivery, p.last_error, array_agg(m.o) AS offsets, array_agg(m.k) AS keys
        FROM unnest(p_parts) p JOIN unnest(p_offsets, p_keys) m (o, k) ON p.held @> m.o
        WHERE NOT p.of_cases
        GROUP BY p.attempt, p.first_delivery, p.last_error
    LOOP
        PERFORM custody.park((p_group).group_id, p_partition, v_part.offsets, v_part.keys, v_part.attempt - 1,
                             v_part.first_delivery, v_part.last_error, NULL, p_now, false);
    END LOOP;
END $$;

-- Takes settled offsets out of a lease. A large row that is settled piece by piece is first split into blocks of 256
-- offsets, because every ack would rewrite a multirange with thousands of gaps. One of the rows that are left counts
-- the settled messages.
CREATE FUNCTION custody.shrink_lease(
    p_lease_id uuid, p_parts custody.leases[], p_gone int8multirange, p_now timestamptz
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_part custody.leases;
    v_next int;
    v_gone bigint;
BEGIN
    WITH gone AS (
        DELETE FROM custody.leases WHERE lease_id = p_lease_id AND deadline > p_now AND held <@ p_gone
        RETURNING remaining + settled AS count)
    SELECT sum(count) INTO v_gone FROM gone;
    FOR v_part IN
        SELECT p.* FROM unnest(p_parts) p
        WHERE p.remaining > 256 AND p.deadline > p_now AND p.held && p_gone AND NOT p.held <@ p_gone
          AND custody.cardinality(p.held * p_gone) * 4 < p.remaining
    LOOP
        SELECT max(part) + 1 INTO v_next FROM custody.leases WHERE lease_id = p_lease_id;
        DELETE FROM custody.leases WHERE lease_id = p_lease_id AND part = v_part.part;
        v_gone := coalesce(v_gone, 0) + v_part.settled + custody.cardinality(v_part.held * p_gone);
        INSERT INTO custody.leases (group_id, partition, claim_no, part, lease_id, held, remaining, of_cases, attempt,
                                    size, deadline, claimed_at, worker, first_delivery, last_error)
        SELECT v_part.group_id, v_part.partition, v_part.claim_no, v_next + b.n, v_part.lease_id, b.block,
               custody.cardinality(b.block), v_part.of_cases, v_part.attempt, v_part.size, v_part.deadline,
               v_part.claimed_at, v_part.worker, v_part.first_delivery, v_part.last_error
        FROM (SELECT n::int,
                     (v_part.held - p_gone) * int8multirange(int8range(n * 256 + lower(v_part.held),
                                                                       (n + 1) * 256 + lower(v_part.held))) AS block
              FROM generate_series(0, (upper(v_part.held) - lower(v_part.held)) / 256) n) b
        WHERE NOT isempty(b.block);
    END LOOP;
    UPDATE custody.leases SET held = held - p_gone, remaining = custody.cardinality(held - p_gone),
                              settled = settled + custody.cardinality(held * p_gone)
    WHERE lease_id = p_lease_id AND deadline > p_now AND held && p_gone;
    IF v_gone > 0 THEN
        UPDATE custody.leases SET settled = settled + v_gone
        WHERE lease_id = p_lease_id
          AND part = (SELECT min(l.part) FROM custody.leases l WHERE l.lease_id = p_lease_id AND l.deadline > p_now);
    END IF;
END $$;
