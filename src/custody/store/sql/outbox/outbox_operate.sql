-- Operators' reads and verbs. Reads change nothing; each verb leaves a record.

-- Every event as it is now: a claim past its deadline has expired, whether that was recorded or not.
CREATE VIEW custody.outbox_events AS
SELECT o.id, o.event_id, o.event_type, nullif(o.destination, '') AS destination, o.partition_key, o.ordering_key,
       o.headers, CASE o.kind WHEN 'j' THEN 'json' WHEN 't' THEN 'text' ELSE 'bytes' END AS payload_kind,
       o.payload AS payload_bytes, o.created_at,
       CASE WHEN x.expired THEN 'PENDING' ELSE o.status END AS status,
       o.attempts + x.expired::int AS attempts, o.available_at,
       CASE WHEN NOT x.expired THEN o.claimed_at END AS claimed_at,
       CASE WHEN NOT x.expired THEN o.claimed_by END AS claimed_by,
       CASE WHEN NOT x.expired THEN o.expires_at END AS expires_at,
       o.published_at, o.updated_at,
       CASE WHEN x.expired THEN format('the claim of %s expired', o.claimed_by) ELSE o.last_error END AS last_error,
       o.replays
FROM custody.outbox o
CROSS JOIN LATERAL (SELECT o.status = 'CLAIMED' AND o.expires_at <= clock_timestamp() AS expired) x;

-- The events that match a filter, the oldest first. Null means no condition; times are those of the last change.
-- p_routed: true for events whose destination exists, false for those whose topic is gone.
CREATE FUNCTION custody.outbox_chosen(
    p_states text[] DEFAULT NULL, p_from timestamptz DEFAULT NULL, p_until timestamptz DEFAULT NULL,
    p_type text DEFAULT NULL, p_destination text DEFAULT NULL, p_ordering_key text DEFAULT NULL,
    p_error text DEFAULT NULL, p_ids uuid[] DEFAULT NULL,
    p_limit bigint DEFAULT NULL, p_routed boolean DEFAULT NULL
) RETURNS TABLE (
    id bigint, event_id uuid, event_type text, destination text, partition_key text, ordering_key text, headers jsonb,
    payload_kind text, payload_bytes bytea, created_at timestamptz, status text, attempts int, available_at timestamptz,
    claimed_at timestamptz, claimed_by text,
    expires_at timestamptz, published_at timestamptz, updated_at timestamptz, last_error text, replays int
)
LANGUAGE sql STABLE AS $$
    SELECT e.* FROM custody.outbox o JOIN custody.outbox_events e USING (id)
    -- The same condition on columns of the table, for its indexes.
    WHERE (p_states IS NULL OR NOT p_states <@ '{PUBLISHED}' OR o.published_at IS NOT NULL)
      AND (p_states IS NULL OR NOT p_states <@ '{DEAD}' OR o.published_at IS NULL)
      AND (p_states IS NULL OR NOT p_states <@ '{PUBLISHED,DEAD}' OR o.ended_at IS NOT NULL
           AND (p_from IS NULL OR o.ended_at >= p_from) AND (p_until IS NULL OR o.ended_at < p_until))
      AND (p_states IS NULL OR NOT p_states <@ '{PENDING,CLAIMED}' OR o.ended_at IS NULL)
      AND (p_states IS NULL OR e.status = ANY (p_states)) AND (p_from IS NULL OR o.updated_at >= p_from)
      AND (p_until IS NULL OR o.updated_at < p_until)
      AND (p_type IS NULL OR e.event_type = p_type) AND (p_destination IS NULL OR o.destination = p_destination)
      AND (p_ordering_key IS NULL OR o.ordering_key = p_ordering_key) AND (p_error IS NULL OR e.last_error LIKE p_error)
      AND (p_ids IS NULL OR o.event_id = ANY (p_ids))
      AND (p_routed IS NULL OR custody.outbox_routed(o.destination) = p_routed)
    ORDER BY o.id LIMIT p_limit
$$;

CREATE FUNCTION custody.outbox_record(
    p_actor text, p_action text, p_reason text, p_chosen jsonb, p_events bigint, p_ids bigint[], p_now timestamptz
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO custody.outbox_audit (at, actor, action, reason, chosen, events, ids)
    VALUES (p_now, p_actor, p_action, p_reason, jsonb_strip_nulls(p_chosen), p_events, p_ids)
$$;

-- What operators did, the newest first.
CREATE FUNCTION custody.outbox_records(p_limit bigint DEFAULT NULL) RETURNS SETOF custody.outbox_audit
LANGUAGE sql STABLE AS $$
    SELECT a.* FROM custody.outbox_audit a ORDER BY a.entry DESC LIMIT p_limit
$$;

-- PUBLISHED or DEAD events become PENDING: due at once, with all attempts; last_error stays. Events of an ordering_key
-- are published in their order. Events of a topic that is gone are left out. An event that was published gets another
-- number: without it a target that remembers events would take it for a repetition.
CREATE FUNCTION custody.outbox_replay(
    p_states text[] DEFAULT '{DEAD}', p_from timestamptz DEFAULT NULL, p_until timestamptz DEFAULT NULL,
    p_type text DEFAULT NULL, p_destination text DEFAULT NULL, p_ordering_key text DEFAULT NULL,
    p_error text DEFAULT NULL, p_ids uuid[] DEFAULT NULL,
    p_limit bigint DEFAULT NULL, p_dry_run boolean DEFAULT false, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL,
    p_now timestamptz DEFAULT NULL
) RETURNS SETOF uuid
LANGUAGE plpgsql AS $$
DECLARE
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
    v_ids   bigint[];
    v_event record;
BEGIN
    PERFORM custody.require_read_committed();
    IF NOT coalesce(p_states <@ ARRAY['PUBLISHED', 'DEAD'], false) THEN
        PERFORM custody.refuse('invalid_argument', 'only events that are PUBLISHED or DEAD can be replayed',
            'Name one of these states, or both.');
    END IF;
    v_ids := ARRAY(SELECT c.id
                   FROM custody.outbox_chosen(p_states, p_from, p_until, p_type, p_destination, p_ordering_key, p_error,
                                              p_ids, p_limit,
                                                               p_routed => true) c);
    IF p_dry_run THEN
        RETURN QUERY SELECT o.event_id FROM custody.outbox o WHERE o.id = ANY (v_ids) ORDER BY o.id;
        RETURN;
    END IF;
    IF p_now IS NOT NULL THEN
        PERFORM set_config('custody.given_time', 'on', true);
    END IF;
    v_ids := ARRAY(SELECT o.id FROM custody.outbox o WHERE o.id = ANY (v_ids) AND o.status = ANY (p_states)
                   ORDER BY o.id FOR UPDATE);
    FOR v_event IN SELECT o.id, o.event_id, o.destination, coalesce(o.ordering_key, o.partition_key) AS key
        FROM custody.outbox o
                   WHERE o.id = ANY (v_ids) ORDER BY o.id
    LOOP
        UPDATE custody.outbox o
        SET status = 'PENDING', attempts = 0, failures = 0, crashes = 0, suspect = NULL, published_at = NULL,
            available_at = v_now, updated_at = v_now, replayed_at = v_now,
            replays = o.replays + (o.status = 'PUBLISHED')::int, topic_id = r.topic_id, partition = r.partition
        FROM custody.outbox_route(v_event.destination, v_event.key) r
        WHERE o.id = v_event.id;
        RETURN NEXT v_event.event_id;
    END LOOP;
    PERFORM custody.outbox_record(p_actor, 'replay', p_reason,
        jsonb_build_object('states', p_states, 'from', p_from, 'until', p_until, 'type', p_type, 'destination',
                           p_destination, 'ordering_key', p_ordering_key, 'error', p_error, 'ids', p_ids, 'limit',
                           p_limit),
        cardinality(v_ids), v_ids, v_now);
END $$;

-- The operator gives events up: they are DEAD, whatever a relay is doing with them.
CREATE FUNCTION custody.outbox_kill(
    p_ids uuid[], p_actor text DEFAULT NULL, p_reason text DEFAULT NULL, p_dry_run boolean DEFAULT false,
    p_now timestamptz DEFAULT NULL
) RETURNS SETOF uuid
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := coalesce(p_now, clock_timestamp());
    v_ids bigint[];
BEGIN
    PERFORM custody.require_read_committed();
    IF p_dry_run THEN
        RETURN QUERY SELECT o.event_id FROM custody.outbox o
            WHERE o.event_id = ANY (p_ids) AND o.status IN ('PENDING', 'CLAIMED') ORDER BY o.id;
        RETURN;
    END IF;
    IF p_now IS NOT NULL THEN
        PERFORM set_config('custody.given_time', 'on', true);
    END IF;
    v_ids := ARRAY(SELECT o.id FROM custody.outbox o
                   WHERE o.event_id = ANY (p_ids) AND o.status IN ('PENDING', 'CLAIMED') ORDER BY o.id FOR UPDATE);
    PERFORM custody.outbox_bury(v_ids, coalesce(p_actor, 'operator'),
                                coalesce('given up: ' || p_reason, 'given up by the operator'), v_now);
    PERFORM custody.outbox_record(p_actor, 'kill', p_reason, jsonb_build_object('ids', p_ids), cardinality(v_ids),
                                  v_ids, v_now);
    RETURN QUERY SELECT o.event_id FROM custody.outbox o WHERE o.id = ANY (v_ids) ORDER BY o.id;
END $$;

-- Events that were published, or are dead, since before a time.
CREATE FUNCTION custody.outbox_ended(p_states text[], p_before timestamptz) RETURNS SETOF bigint
LANGUAGE sql STABLE AS $$
    SELECT id FROM custody.outbox
    WHERE 'PUBLISHED' = ANY (p_states) AND published_at IS NOT NULL AND ended_at < p_before
    UNION ALL
    SELECT id FROM custody.outbox WHERE 'DEAD' = ANY (p_states) AND published_at IS NULL AND ended_at < p_before
$$;

-- Deletes events that were published (or are dead, if asked) before a time. Returns how many; with p_dry_run how many
-- it would be.
CREATE FUNCTION custody.outbox_prune(
    p_before timestamptz, p_states text[] DEFAULT '{PUBLISHED}', p_dry_run boolean DEFAULT false,
    p_actor text DEFAULT NULL, p_reason text DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_gone bigint;
BEGIN
    PERFORM custody.require_read_committed();
    IF NOT coalesce(p_states <@ ARRAY['PUBLISHED', 'DEAD'], false) OR p_before IS NULL THEN
        PERFORM custody.refuse('invalid_argument',
            'only events that are PUBLISHED or DEAD, and have been so for a while, can be pruned',
            'Give a time, and one of these states, or both.');
    END IF;
    IF p_dry_run THEN
        RETURN (SELECT count(*) FROM custody.outbox_ended(p_states, p_before));
    END IF;
    DELETE FROM custody.outbox WHERE id IN (SELECT custody.outbox_ended(p_states, p_before));
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    PERFORM custody.outbox_record(p_actor, 'prune', p_reason,
                                  jsonb_build_object('before', p_before, 'states', p_states), v_gone, NULL,
                                  coalesce(p_now, clock_timestamp()));
    RETURN v_gone;
END $$;

-- Forgets which events of other databases have come before a time: a later repetition counts as new. Returns how many;
-- with p_dry_run how many it would be.
CREATE FUNCTION custody.outbox_forget(
    p_before timestamptz, p_dry_run boolean DEFAULT false, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL,
    p_now timestamptz DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_gone bigint;
BEGIN
    IF p_dry_run THEN
        RETURN (SELECT count(*) FROM custody.outbox_received WHERE received_at < p_before);
    END IF;
    DELETE FROM custody.outbox_received WHERE received_at < p_before;
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    PERFORM custody.outbox_record(p_actor, 'forget', p_reason, jsonb_build_object('before', p_before), v_gone, NULL,
                                  coalesce(p_now, clock_timestamp()));
    RETURN v_gone;
END $$;

-- Figures for each destination: what waits and since when, what is claimed and dead, what was published and failed in
-- the last p_window. Events that were published before that are not counted.
CREATE FUNCTION custody.outbox_stats(p_window interval DEFAULT '1 minute', p_now timestamptz DEFAULT NULL)
RETURNS TABLE (
    destination text, backlog bigint, due bigint, retrying bigint, claimed bigint, dead bigint,
    oldest_pending timestamptz, published_recently bigint, died_recently bigint, failures bigint
)
LANGUAGE sql STABLE AS $$
    WITH at AS (SELECT coalesce(p_now, clock_timestamp()) AS now)
    SELECT x.destination, sum(x.backlog)::bigint, sum(x.due)::bigint, sum(x.retrying)::bigint, sum(x.claimed)::bigint,
           sum(x.dead)::bigint, min(x.oldest), sum(x.published)::bigint, sum(x.died)::bigint, sum(x.failures)::bigint
    FROM (
        SELECT nullif(o.destination, '') AS destination, count(*) AS backlog,
               count(*) FILTER (WHERE o.available_at <= at.now) AS due,
               count(*) FILTER (WHERE o.attempts > 0) AS retrying, 0 AS claimed, 0 AS dead,
               min(custody.outbox_waits_since(o)) FILTER (WHERE o.attempts > 0 OR o.available_at <= at.now) AS oldest,
               0 AS published, 0 AS died, coalesce(sum(o.attempts), 0) AS failures
        FROM custody.outbox o, at WHERE o.ended_at IS NULL AND o.status = 'PENDING' GROUP BY 1
        UNION ALL
        SELECT nullif(o.destination, ''), count(*) FILTER (WHERE o.expires_at <= at.now),
               count(*) FILTER (WHERE o.expires_at <= at.now), count(*) FILTER (WHERE o.expires_at <= at.now),
               count(*) FILTER (WHERE o.expires_at > at.now), 0,
               min(custody.outbox_waits_since(o)) FILTER (WHERE o.expires_at <= at.now), 0, 0,
               coalesce(sum(o.attempts), 0)
        FROM custody.outbox o, at WHERE o.ended_at IS NULL AND o.status = 'CLAIMED' GROUP BY 1
        UNION ALL
        SELECT nullif(o.destination, ''), 0, 0, 0, 0, count(*), NULL, 0,
               count(*) FILTER (WHERE o.ended_at > at.now - p_window), coalesce(sum(o.attempts), 0)
        FROM custody.outbox o, at WHERE o.ended_at IS NOT NULL AND o.published_at IS NULL GROUP BY 1
        UNION ALL
        SELECT nullif(o.destination, ''), 0, 0, 0, 0, 0, NULL, count(*), 0, 0
        FROM custody.outbox o, at WHERE o.published_at IS NOT NULL AND o.ended_at > at.now - p_window GROUP BY 1
    ) x
    GROUP BY x.destination ORDER BY x.destination NULLS FIRST
$$;

CREATE FUNCTION custody.outbox_clock() RETURNS timestamptz
LANGUAGE sql VOLATILE AS $$
    SELECT clock_timestamp()
$$;
