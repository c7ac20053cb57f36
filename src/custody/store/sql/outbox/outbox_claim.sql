-- The verbs of a relay: claim, settle, extend. Each claim has its own name (the relay's and a number), and only its
-- holder can settle it.

-- Ends claims that have expired, and counts an attempt for each event. The deadline alone decides that for every
-- reader; this only records it. One of the events may have killed its relay. Smaller claims, a tenth each time, find
-- out which one. Only an event that was claimed alone, as a suspect, is charged: it is dead after p_max_attempts of
-- that.
CREATE FUNCTION custody.outbox_expire(p_ids bigint[], p_max_attempts int, p_now timestamptz) RETURNS void
LANGUAGE sql AS $$
    WITH expired AS (
        SELECT o.id FROM custody.outbox o
        WHERE o.id = ANY (p_ids) AND o.claimed_by IS NOT NULL AND o.expires_at <= p_now
        FOR UPDATE SKIP LOCKED
    )
    UPDATE custody.outbox o
    SET status = CASE WHEN o.suspect = 1 AND o.crashes + 1 >= p_max_attempts THEN 'DEAD' ELSE 'PENDING' END,
        attempts = o.attempts + 1, crashes = o.crashes + coalesce(o.suspect = 1, false)::int,
        suspect = custody.outbox_next_size(o.claimed_with),
        last_error = format('the claim of %s expired', o.claimed_by), claimed_at = NULL, claimed_by = NULL,
        expires_at = NULL, claimed_with = NULL, updated_at = p_now
    FROM expired e WHERE o.id = e.id
$$;

-- The most events that are claimed together after a claim of so many has expired.
CREATE FUNCTION custody.outbox_next_size(p_size int) RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(1, p_size / 10)
$$;

-- Which of these events to claim now. p_sizes has the size of each suspect, and null for the others. Suspects are not
-- claimed with other events, nor more of them than the smallest of their sizes. One that has to be alone is claimed
-- only by a relay that has no other event in hand (p_alone). In the order of their ids, the kind that comes first is
-- chosen. `left_out` is the first of the others; `held_back`: one waits to be alone.
CREATE FUNCTION custody.outbox_apart(
    p_ids bigint[], p_sizes int[], p_alone boolean, OUT ids bigint[], OUT left_out bigint, OUT held_back boolean
)
LANGUAGE sql IMMUTABLE AS $$
    WITH given AS (
        SELECT e.id, e.size, e.size = 1 AND NOT p_alone AS held_back FROM unnest(p_ids, p_sizes) e (id, size)
    ), placed AS (
        SELECT g.id, g.size, first_value(g.size) OVER (ORDER BY g.id) IS NOT NULL AS suspects,
               row_number() OVER w AS place, min(g.size) OVER w AS most
        FROM given g WHERE g.held_back IS NOT TRUE
        WINDOW w AS (PARTITION BY g.size IS NULL ORDER BY g.id)
    ), judged AS (
        SELECT p.id, (p.size IS NOT NULL) = p.suspects AND (p.size IS NULL OR p.place <= p.most) AS taken FROM placed p
    )
    SELECT coalesce(array_agg(j.id ORDER BY j.id) FILTER (WHERE j.taken), '{}'), min(j.id) FILTER (WHERE NOT j.taken),
           coalesce((SELECT bool_or(g.held_back) FROM given g), false)
    FROM judged j
$$;

-- Up to p_max due events from p_after on, of destinations whose name (before the colon) is in p_names; not of
-- p_excepted, or only of p_only. The first row has no id; its `scanned` says where to go on, null at the end. At most
-- p_window events are scanned, so that a backlog that has to wait costs no more than that. Expired claims are found
-- among the pending events. Those of other names are left to a relay that serves them, because its limit counts.
-- Of an ordering_key only events with nothing open before them are claimed. p_hold: dead events hold their key, too.
-- p_alone: the relay has no other event in hand. It may get an event that has to be alone (its `suspect` is 1): then it
-- claims no more until that one is settled. If such an event is held back because the relay is busy, the `suspect` of
-- the first row is 1.
CREATE FUNCTION custody.outbox_claim(
    p_relay text, p_max int, p_lease interval, p_max_attempts int, p_max_age interval DEFAULT NULL,
    p_names text[] DEFAULT NULL, p_excepted text[] DEFAULT NULL, p_only text[] DEFAULT NULL,
    p_hold boolean DEFAULT false, p_after bigint DEFAULT 0,
    p_window int DEFAULT 5000, p_now timestamptz DEFAULT NULL, p_alone boolean DEFAULT true
) RETURNS TABLE (
    id bigint, event_id uuid, event_type text, destination text, kind "char", payload bytea, headers jsonb,
    partition_key text, ordering_key text, created_at timestamptz, attempts int, replays int, claimed_by text,
    expires_at timestamptz, scanned bigint, suspect int
)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
    v_claim text := format('%s/%s', p_relay, gen_random_uuid());
    v_ids   bigint[];
    v_ended bigint[];
    v_found bigint;
    v_old   bigint[];
    v_sizes int[];      -- of suspects; null if there are none
    v_apart record;
BEGIN
    PERFORM custody.require_read_committed();
    IF p_max IS NULL OR p_max < 1 THEN
        PERFORM custody.refuse('invalid_argument', 'a claim takes at least one event');
    ELSIF coalesce(p_lease, '0') <= '0' THEN
        PERFORM custody.refuse('invalid_argument', 'the lease must be positive');
    END IF;
    IF p_now IS NOT NULL THEN
        PERFORM set_config('custody.given_time', 'on', true);
    END IF;

    -- Chosen without locks, so that events that have to wait are not locked in passing. Ordered by more than the id,
    -- and keys compared as rows: otherwise a plan may read the primary key, with all published events.
    SELECT coalesce(array_agg(c.id ORDER BY c.id) FILTER (WHERE c.wanted), '{}'),
           array_agg(c.id) FILTER (WHERE c.expired), count(*), max(c.id),
           CASE WHEN bool_or(c.size IS NOT NULL) FILTER (WHERE c.wanted) THEN array_agg(c.size
                   ORDER BY c.id) FILTER (WHERE c.wanted) END
    INTO v_ids, v_ended, v_found, scanned, v_sizes
    FROM (
        SELECT w.id, w.expired AND n.served AS expired, x.wanted, w.size
        FROM (SELECT o.id, o.destination, o.ordering_key, o.available_at, o.claimed_by IS NOT NULL AS expired,
                     CASE WHEN o.claimed_by IS NULL THEN o.suspect
                          ELSE custody.outbox_next_size(o.claimed_with) END AS size,
                     o.claimed_by IS NOT NULL AND o.suspect = 1 AND o.crashes + 1 >= p_max_attempts AS dies
              FROM custody.outbox o
              WHERE o.ended_at IS NULL AND o.topic_id IS NULL AND o.id > p_after
                AND (o.claimed_by IS NULL OR o.expires_at <= v_now)
              ORDER BY o.topic_id, o.id LIMIT p_window) w
        LEFT JOIN LATERAL (
            SELECT (h.claimed_by IS NULL OR h.expires_at <= v_now) AND h.available_at <= v_now AS ready
            FROM custody.outbox h
            WHERE (h.ordering_key, h.destination, h.id) > (w.ordering_key, w.destination, 0)
              AND (h.ordering_key, h.destination) <= (w.ordering_key, w.destination)
              AND h.ordering_key IS NOT NULL AND h.published_at IS NULL AND (p_hold OR h.ended_at IS NULL)
            ORDER BY h.ordering_key, h.destination, h.id LIMIT 1) first ON true
        CROSS JOIN LATERAL (SELECT p_names IS NULL OR split_part(w.destination, ':', 1) = ANY (p_names) AS served) n
        CROSS JOIN LATERAL (
            SELECT n.served AND w.dies IS NOT TRUE AND w.available_at <= v_now
                AND (w.ordering_key IS NULL OR first.ready)
               AND (p_only IS NULL OR w.destination = ANY (p_only))
               AND (p_excepted IS NULL OR NOT w.destination = ANY (p_excepted)) AS wanted) x
        WHERE w.expired AND n.served OR x.wanted
        LIMIT p_max) c;
    IF v_found < p_max THEN
        SELECT CASE WHEN count(*) = p_window THEN max(w.id) END INTO scanned
        FROM (SELECT o.id FROM custody.outbox o
              WHERE o.ended_at IS NULL AND o.topic_id IS NULL AND o.id > p_after
                AND (o.claimed_by IS NULL OR o.expires_at <= v_now)
              ORDER BY o.topic_id, o.id LIMIT p_window) w;
    END IF;
    IF v_ended IS NOT NULL THEN
        PERFORM custody.outbox_expire(v_ended, p_max_attempts, v_now);
    END IF;
    IF v_sizes IS NOT NULL THEN
        v_apart := custody.outbox_apart(v_ids, v_sizes, p_alone);
        v_ids := v_apart.ids;
        suspect := CASE WHEN v_apart.held_back THEN 1 END;
    END IF;
    v_ids := ARRAY(
        SELECT o.id FROM custody.outbox o WHERE o.id = ANY (v_ids) AND o.status = 'PENDING' AND o.available_at <= v_now
        FOR UPDATE SKIP LOCKED);
    IF p_max_age IS NOT NULL THEN
        SELECT coalesce(array_agg(o.id) FILTER (WHERE x.old), '{}'),
               coalesce(array_agg(o.id) FILTER (WHERE NOT x.old), '{}') INTO v_old, v_ids
        FROM custody.outbox o CROSS JOIN LATERAL (SELECT custody.outbox_waits_since(o) <= v_now - p_max_age AS old) x
        WHERE o.id = ANY (v_ids);
        PERFORM custody.outbox_bury(v_old, p_relay, format('it was older than %s', p_max_age), v_now);
    END IF;
    v_ids := custody.outbox_in_order(v_ids, p_hold);
    IF v_sizes IS NOT NULL AND cardinality(v_ids) > 0 THEN
        scanned := least(scanned, v_apart.left_out - 1);
    END IF;
    RETURN NEXT;
    RETURN QUERY
    UPDATE custody.outbox o
    SET status = 'CLAIMED', claimed_at = v_now, claimed_by = v_claim, expires_at = v_now + p_lease,
        claimed_with = cardinality(v_ids), updated_at = v_now
    WHERE o.id = ANY (v_ids) AND o.status = 'PENDING'
    RETURNING o.id, o.event_id, o.event_type, o.destination, o.kind, o.payload, o.headers, o.partition_key,
              o.ordering_key, o.created_at, o.attempts, o.replays, o.claimed_by, o.expires_at, NULL::bigint, o.suspect;
END $$;

-- Ends events without another attempt. PENDING ones are claimed first, because there is no direct move.
CREATE FUNCTION custody.outbox_bury(p_ids bigint[], p_by text, p_error text, p_now timestamptz) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_buried bigint;
BEGIN
    UPDATE custody.outbox SET available_at = p_now, updated_at = p_now
    WHERE id = ANY (p_ids) AND status = 'PENDING' AND available_at > p_now;
    UPDATE custody.outbox SET status = 'CLAIMED', claimed_at = p_now, claimed_by = p_by,
        expires_at = p_now + interval '1 min', updated_at = p_now
    WHERE id = ANY (p_ids) AND status = 'PENDING';
    UPDATE custody.outbox SET status = 'DEAD', last_error = p_error, claimed_at = NULL, claimed_by = NULL,
        expires_at = NULL, claimed_with = NULL, updated_at = p_now
    WHERE id = ANY (p_ids) AND status = 'CLAIMED';
    GET DIAGNOSTICS v_buried = ROW_COUNT;
    RETURN v_buried;
END $$;

-- Of the events of a claim that could be locked: those before which nobody else has locked one of their key. The others
-- follow that one: if its claim expires, they are published again behind it, and not before.
CREATE FUNCTION custody.outbox_unhindered(p_claim text, p_ids bigint[], p_locked bigint[]) RETURNS bigint[]
LANGUAGE sql VOLATILE AS $$
    WITH skipped AS MATERIALIZED (
        SELECT o.ordering_key, o.destination, min(o.id) AS id FROM custody.outbox o
        WHERE o.id = ANY (p_ids) AND NOT o.id = ANY (p_locked) AND o.claimed_by = p_claim AND o.ordering_key IS NOT NULL
        GROUP BY o.ordering_key, o.destination
    )
    SELECT coalesce(array_agg(o.id ORDER BY o.id), '{}')
    FROM custody.outbox o
    LEFT JOIN skipped s ON s.ordering_key = o.ordering_key AND s.destination = o.destination AND s.id < o.id
    WHERE o.id = ANY (p_locked) AND s.id IS NULL
$$;

-- The outcomes of claimed events: published; failed (an attempt is counted, and it is tried again after its delay);
-- unavailable (an attempt is counted, but the event does not die of it: its destination was down, or took no more);
-- dead (a terminal error); or released (no attempt was made). A failed event is dead if it has failed p_max_attempts
-- times and is older than p_retry_for, or if it is older than p_max_age.
-- Returns the new state of each. An event that the claim no longer holds is left out and unchanged. An event that
-- somebody else has locked (an operator, in an open transaction) is not waited for: it is still CLAIMED, to be settled
-- later, and so are those behind it in its key.
CREATE FUNCTION custody.outbox_settle(
    p_claim text, p_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[], p_max_attempts int,
    p_max_age interval DEFAULT NULL, p_now timestamptz DEFAULT NULL, p_retry_for interval DEFAULT '0'
) RETURNS TABLE (id bigint, status text)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now       timestamptz;
    v_ids       bigint[];
    v_published bigint[];
BEGIN
    IF EXISTS (SELECT FROM unnest(p_outcomes) s
               WHERE s IS NULL OR s NOT IN ('published', 'failed', 'unavailable', 'dead', 'released')) THEN
        PERFORM custody.refuse('invalid_argument', 'an event is published, failed, unavailable, dead or released');
    END IF;
    IF p_now IS NOT NULL THEN
        PERFORM set_config('custody.given_time', 'on', true);
    END IF;
    -- Lock the rows first, so that each later statement sees their current state: the claim may have expired, and
    -- another relay may hold them.
    v_ids := ARRAY(SELECT o.id FROM custody.outbox o WHERE o.id = ANY (p_ids) FOR UPDATE SKIP LOCKED);
    v_now := coalesce(p_now, clock_timestamp());
    IF cardinality(v_ids) < cardinality(p_ids) THEN
        v_ids := custody.outbox_unhindered(p_claim, p_ids, v_ids);
        RETURN QUERY
        SELECT o.id, o.status FROM custody.outbox o
        WHERE o.id = ANY (p_ids) AND NOT o.id = ANY (v_ids) AND o.claimed_by = p_claim AND o.expires_at > v_now;
        SELECT array_agg(s.id), array_agg(s.outcome), array_agg(s.error), array_agg(s.delay)
        INTO p_ids, p_outcomes, p_errors, p_delays
        FROM unnest(p_ids, p_outcomes, p_errors, p_delays) s (id, outcome, error, delay) WHERE s.id = ANY (v_ids);
    END IF;
    v_published := ARRAY(SELECT s.id FROM unnest(p_ids, p_outcomes) s (id, outcome) WHERE s.outcome = 'published');
    RETURN QUERY
    UPDATE custody.outbox o
    SET status = 'PUBLISHED', published_at = v_now, claimed_at = NULL, claimed_by = NULL, expires_at = NULL,
        claimed_with = NULL, suspect = NULL, updated_at = v_now
    WHERE o.id = ANY (v_published) AND o.claimed_by = p_claim AND o.expires_at > v_now
    RETURNING o.id, o.status;
    IF cardinality(v_published) = cardinality(p_ids) THEN
        RETURN;
    END IF;
    RETURN QUERY
    UPDATE custody.outbox o
    SET status = CASE WHEN s.outcome = 'dead' OR s.outcome = 'failed' AND (
                          o.failures + 1 >= p_max_attempts AND custody.outbox_waits_since(o) <= v_now - p_retry_for
                          OR custody.outbox_waits_since(o) <= v_now - p_max_age)
                      THEN 'DEAD' ELSE 'PENDING' END,
        attempts = o.attempts + (s.outcome <> 'released')::int,
        failures = o.failures + (s.outcome IN ('failed', 'dead'))::int,
        releases = o.releases + (s.outcome = 'released')::int,
        last_error = coalesce(s.error, o.last_error),
        available_at = CASE WHEN s.outcome = 'failed' THEN v_now + make_interval(secs => coalesce(s.delay, 0))
                            ELSE o.available_at END,
        -- An event that was tried and left its relay alive is no suspect.
        claimed_at = NULL, claimed_by = NULL, expires_at = NULL, claimed_with = NULL,
        suspect = CASE WHEN s.outcome = 'released' THEN o.suspect END, updated_at = v_now
    FROM unnest(p_ids, p_outcomes, p_errors, p_delays) s (id, outcome, error, delay)
    WHERE s.outcome <> 'published' AND o.id = s.id AND o.claimed_by = p_claim AND o.expires_at > v_now
    RETURNING o.id, o.status;
END $$;

-- Extends a claim. Returns the events that it still holds. Events that somebody else has locked are not waited for and
-- not returned, nor are those behind them in their keys.
CREATE FUNCTION custody.outbox_extend(p_claim text, p_ids bigint[], p_lease interval, p_now timestamptz DEFAULT NULL)
RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_ids bigint[] := ARRAY(SELECT o.id FROM custody.outbox o WHERE o.id = ANY (p_ids) FOR UPDATE SKIP LOCKED);
    v_now timestamptz := coalesce(p_now, clock_timestamp());
BEGIN
    IF cardinality(v_ids) < cardinality(p_ids) THEN
        v_ids := custody.outbox_unhindered(p_claim, p_ids, v_ids);
    END IF;
    IF p_now IS NOT NULL THEN
        PERFORM set_config('custody.given_time', 'on', true);
    END IF;
    RETURN QUERY
    UPDATE custody.outbox o SET expires_at = v_now + p_lease, updated_at = v_now
    WHERE o.id = ANY (v_ids) AND o.claimed_by = p_claim AND o.expires_at > v_now
    RETURNING o.id;
END $$;

-- How many events are not finished that a relay with publishers of these names would serve, including those for topics
-- of this database.
CREATE FUNCTION custody.outbox_left(p_names text[]) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM custody.outbox o
            WHERE o.ended_at IS NULL AND o.topic_id IS NULL AND split_part(o.destination, ':', 1) = ANY (p_names))
         + (SELECT count(*) FROM custody.outbox o WHERE o.ended_at IS NULL AND o.topic_id IS NOT NULL)
$$;

-- Whether an event is open for a destination that relays serve.
CREATE FUNCTION custody.outbox_waits(p_destination text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM custody.outbox o
                   WHERE o.ended_at IS NULL AND o.topic_id IS NULL AND o.destination = p_destination)
$$;

-- Destinations for which events wait that no publisher of these names serves.
CREATE FUNCTION custody.outbox_unserved(p_names text[], p_now timestamptz DEFAULT NULL)
RETURNS TABLE (destination text, events bigint)
LANGUAGE sql STABLE AS $$
    SELECT o.destination, count(*) FROM custody.outbox o
    WHERE o.ended_at IS NULL AND (o.claimed_by IS NULL OR o.expires_at <= coalesce(p_now, clock_timestamp()))
      AND o.topic_id IS NULL
      AND NOT split_part(o.destination, ':', 1) = ANY (p_names)
    GROUP BY o.destination ORDER BY 1 LIMIT 100
$$;
