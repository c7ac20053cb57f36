-- Failures: the message gets a case that waits for the next attempt, or that is dead.

-- What is kept of an error: as many characters as LONGEST_ERROR of verbs/settle.py says.
CREATE FUNCTION custody.kept_error(p_error text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT left(p_error, 8000)
$$;

-- What is kept of a traceback: its end, as many characters as LONGEST_TRACEBACK of model/tracebacks.py says.
CREATE FUNCTION custody.kept_traceback(p_traceback text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT right(p_traceback, 2000)
$$;

CREATE FUNCTION custody.backoff(p_group custody.groups, p_failures int) RETURNS interval
LANGUAGE sql VOLATILE AS $$
    SELECT make_interval(secs => (1 - (p_group).backoff_jitter * random()) * least(
        extract(epoch FROM (p_group).backoff_cap)::double precision,
        extract(epoch FROM (p_group).backoff_initial)::double precision * CASE (p_group).backoff_kind
            -- The power would overflow far beyond any cap.
            WHEN 'exponential' THEN power((p_group).backoff_multiplier,
                                          least(p_failures - 1, 64 / greatest(ln((p_group).backoff_multiplier), 0.01)))
            WHEN 'linear' THEN p_failures
            ELSE 1 END))
$$;

CREATE TYPE custody.failure AS (
    "offset"       bigint,
    key            text,
    attempts       int,           -- deliveries so far, if the message has no case yet
    first_delivery timestamptz,
    error          text,
    traceback      text,
    delay          interval,      -- null: the backoff of the policy
    dead_reason    text           -- null: retry while the policy allows it
);

-- Charges each message with one failure. The caller holds the lease or the cursor, so nobody else moves these messages.
-- p_exhausted is the reason of messages that have no attempt left; p_lease_cap bounds the next lease of the others.
CREATE FUNCTION custody.charge(
    p_group custody.groups, p_head custody.heads, p_failures custody.failure[], p_exhausted text, p_lease_cap int,
    p_worker text, p_lease uuid, p_now timestamptz
) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    v_partition constant int := p_head.partition;
    v_dead bigint[];
BEGIN
    WITH charged AS MATERIALIZED (
        SELECT f."offset", f.key, f.error, f.traceback, f.delay,
               coalesce(c.attempts, f.attempts) AS attempts,
               coalesce(c.failures, 0) + 1 AS failures,
               coalesce(c.first_delivery, f.first_delivery, p_now) AS first_delivery,
               coalesce(c.first_failure, p_now) AS first_failure,
               coalesce(c.errors, '{}') AS errors,
               CASE WHEN f.dead_reason IS NOT NULL THEN f.dead_reason
                    WHEN coalesce(c.failures, 0) + 1 >= (p_group).max_attempts
                        OR c.first_failure <= p_now - (p_group).retry_for THEN p_exhausted END AS dead_reason
        FROM unnest(p_failures) f
        -- LIMIT keeps the planner from reading all cases of the partition.
        LEFT JOIN LATERAL (SELECT * FROM custody.cases x
                           WHERE x.group_id = (p_group).group_id AND x.partition = v_partition
                             AND x."offset" = f."offset" LIMIT 1) c ON true
    ), written AS (
        INSERT INTO custody.cases AS c (
            group_id, partition, "offset", key, state, held, attempts, failures, run_at, lease_cap, first_delivery,
            first_failure, last_error, last_traceback, errors, dead_reason, worker, updated_at, published_at, kind,
            payload, headers)
        SELECT (p_group).group_id, v_partition, f."offset", f.key,
               CASE WHEN f.dead_reason IS NULL THEN 'waiting' ELSE 'dead' END,
               f.dead_reason IS NOT NULL AND (p_group).on_dead = 'hold' AND (p_group).ordering = 'key'
                   AND f.key IS NOT NULL,
               f.attempts, f.failures,
               p_now + CASE WHEN f.dead_reason IS NOT NULL THEN '0 s'
                            ELSE coalesce(f.delay, custody.backoff(p_group, f.failures)) END, p_lease_cap,
               f.first_delivery, f.first_failure, f.error, f.traceback,
               -- Only the newest fifty, because a message may be retried for ever.
               (f.errors || ('attempt ' || f.attempts || ': ' || coalesce(f.error, 'no error given')))
                   [greatest(1, cardinality(f.errors) - 48):],
               f.dead_reason, p_worker, p_now, e.published_at, e.kind, e.payload, e.headers
        FROM charged f
        LEFT JOIN custody.events_in(p_head, (SELECT range_agg(int8range(d."offset", d."offset" + 1)) FROM charged d
                                             WHERE d.dead_reason IS NOT NULL)) e USING ("offset")
        ON CONFLICT (group_id, partition, "offset") DO UPDATE SET
            state = excluded.state, held = excluded.held, attempts = excluded.attempts, failures = excluded.failures,
            run_at = excluded.run_at, lease_cap = excluded.lease_cap, first_delivery = excluded.first_delivery,
            first_failure = excluded.first_failure, last_error = excluded.last_error,
            last_traceback = excluded.last_traceback, errors = excluded.errors, dead_reason = excluded.dead_reason,
            worker = excluded.worker, updated_at = excluded.updated_at, published_at = excluded.published_at,
            kind = excluded.kind, payload = excluded.payload, headers = excluded.headers
        RETURNING c."offset", c.key, c.state, c.held, c.failures, c.dead_reason, c.last_error, c.last_traceback
    ), freed AS (
        INSERT INTO custody.freed (group_id, partition, key, most)
        SELECT (p_group).group_id, v_partition, w.key, custody.comes_back_with(max(w.failures))
        FROM written w WHERE w.state = 'dead' AND NOT w.held AND w.key IS NOT NULL AND (p_group).ordering = 'key'
        GROUP BY w.key
    ), journalled AS (
        INSERT INTO custody.journal (at, kind, group_id, partition, lease_id, offsets, worker, error, detail)
        SELECT p_now, 'dead', (p_group).group_id, v_partition, p_lease,
               range_agg(int8range(w."offset", w."offset" + 1)), p_worker, min(w.last_error),
               jsonb_strip_nulls(jsonb_build_object('reason', w.dead_reason, 'traceback', w.last_traceback))
        FROM written w WHERE w.state = 'dead' GROUP BY w.dead_reason, w.last_error, w.last_traceback
    )
    SELECT array_agg(w."offset" ORDER BY w."offset") FILTER (WHERE w.state = 'dead') INTO v_dead FROM written w;
    RETURN coalesce(v_dead, '{}');
END $$;
