-- The outbox: events that are written in the caller's own transaction. Triggers refuse every change of an event that is
-- not a legal move.

-- Called only to refuse: the conditions of the triggers below decide. A TRUNCATE has no condition, and is checked here.
CREATE FUNCTION custody.outbox_refused() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF octet_length(NEW.partition_key) > 2000 OR octet_length(NEW.ordering_key) > 2000 THEN
            PERFORM custody.refuse('invalid_payload', 'a key has at most 2,000 bytes',
                'Shorten it, or take a hash of it.');
        ELSIF NEW.id < 1 THEN
            PERFORM custody.refuse('outbox_refused',
                format('the id of an event is at least 1, not %s: no relay would find it', NEW.id),
                'Leave the id out.');
        END IF;
        PERFORM custody.refuse('outbox_refused',
            format('an event begins as PENDING without attempts, not as %s', NEW.status),
            'Write it with outbox_write.');
    ELSIF TG_OP = 'TRUNCATE' THEN
        IF EXISTS (SELECT FROM custody.outbox WHERE ended_at IS NULL) THEN
            PERFORM custody.refuse('outbox_refused', 'there are open events, which would be lost',
                'Only what is PUBLISHED or DEAD can be removed: see outbox_prune and outbox_kill.');
        END IF;
        RETURN NULL;
    ELSIF TG_OP = 'DELETE' THEN
        PERFORM custody.refuse('outbox_refused', format('event %s is %s and would be lost', OLD.event_id, OLD.status),
            'Only what is PUBLISHED or DEAD can be removed: see outbox_prune and outbox_kill.');
    ELSIF OLD.status = 'PENDING' AND NEW.status = 'CLAIMED' AND OLD.attempts = NEW.attempts THEN
        PERFORM custody.refuse('outbox_refused',
            format('event %s, available at %s, cannot be claimed at %s', OLD.event_id, OLD.available_at,
                                                        NEW.claimed_at),
            'An event is claimed when it is available, with the current time as claimed_at: see outbox_claim.');
    ELSIF OLD.status = 'CLAIMED' AND NEW.status = 'PUBLISHED' AND OLD.attempts = NEW.attempts THEN
        PERFORM custody.refuse('outbox_refused',
            format('the claim of event %s expired at %s', OLD.event_id, OLD.expires_at),
            'Another relay may have the event: claim it again.');
    ELSIF OLD.status = 'CLAIMED' AND NEW.status = 'PENDING' THEN
        PERFORM custody.refuse('outbox_refused',
            format('event %s cannot go back to PENDING with %s attempts instead of %s', OLD.event_id,
                   NEW.attempts, OLD.attempts + 1),
            'A failure and an expiry add one to attempts. If no attempt was made, add one to releases instead.');
    ELSIF OLD.status IN ('PUBLISHED', 'DEAD') AND NEW.status = 'PENDING' THEN
        PERFORM custody.refuse('outbox_refused',
            format('event %s, which is %s, is not replayed by this', OLD.event_id, OLD.status),
            'Use outbox_replay: it counts the delivery, '
            'without which a target that knows the event would leave it out.');
    ELSIF OLD.status <> NEW.status THEN
        PERFORM custody.refuse('outbox_refused',
            format('event %s cannot go from %s with %s attempts to %s with %s', OLD.event_id, OLD.status,
                   OLD.attempts, NEW.status, NEW.attempts),
            'The moves are PENDING to CLAIMED; CLAIMED to PUBLISHED, PENDING or DEAD; '
            'and back to PENDING by outbox_replay.');
    END IF;
    PERFORM custody.refuse('outbox_refused',
        format('event %s: what was changed does not change in a life as %s', OLD.event_id, OLD.status),
        'What an event says never changes; who claimed it does not change while it is CLAIMED, '
        'and an expired claim is not extended.');
    RETURN NULL;
END $$;

CREATE TRIGGER outbox_begins BEFORE INSERT ON custody.outbox FOR EACH ROW
    WHEN (NEW.status <> 'PENDING' OR NEW.attempts <> 0 OR NEW.replays <> 0 OR NEW.releases <> 0 OR NEW.crashes <> 0
          OR NEW.id < 1
          OR octet_length(NEW.partition_key) > 2000 OR octet_length(NEW.ordering_key) > 2000)
    EXECUTE FUNCTION custody.outbox_refused();

CREATE TRIGGER outbox_stays BEFORE DELETE ON custody.outbox FOR EACH ROW
    WHEN (OLD.status IN ('PENDING', 'CLAIMED'))
    EXECUTE FUNCTION custody.outbox_refused();

CREATE TRIGGER outbox_stays_whole BEFORE TRUNCATE ON custody.outbox FOR EACH STATEMENT
    EXECUTE FUNCTION custody.outbox_refused();

-- It fires only for statements that name one of these columns. No verb does, so no verb pays for comparing payloads.
CREATE TRIGGER outbox_says BEFORE UPDATE OF id, event_id, event_type, destination, kind, payload, headers,
partition_key, ordering_key, created_at,
    first_due ON custody.outbox FOR EACH ROW
    WHEN (OLD.id <> NEW.id OR OLD.event_id <> NEW.event_id OR OLD.event_type <> NEW.event_type
          OR OLD.destination <> NEW.destination
          OR OLD.kind <> NEW.kind OR OLD.payload <> NEW.payload OR OLD.headers IS DISTINCT FROM NEW.headers
          OR OLD.partition_key IS DISTINCT FROM NEW.partition_key OR OLD.ordering_key IS DISTINCT FROM NEW.ordering_key
          OR OLD.created_at <> NEW.created_at OR OLD.first_due IS DISTINCT FROM NEW.first_due)
    EXECUTE FUNCTION custody.outbox_refused();

-- The six moves. A failure and an expiry count an attempt. A release gives an event back without an attempt, and is
-- counted as such. `replays` counts how often an event is published again: without it a target that remembers events
-- would take it for a repetition. Times are compared with those of the server: a claim is made now, and a claim that
-- had expired when the transaction began publishes nothing. A caller that gives its own time (p_now) sets
-- custody.given_time for its transaction. IS NOT TRUE: null is refused.
CREATE TRIGGER outbox_moves BEFORE UPDATE ON custody.outbox FOR EACH ROW
    WHEN ((CASE
        WHEN OLD.status = NEW.status THEN
            OLD.attempts = NEW.attempts AND OLD.crashes = NEW.crashes AND OLD.releases = NEW.releases
                AND OLD.replays = NEW.replays
            AND OLD.claimed_by IS NOT DISTINCT FROM NEW.claimed_by
            AND OLD.claimed_at IS NOT DISTINCT FROM NEW.claimed_at
            AND OLD.published_at IS NOT DISTINCT FROM NEW.published_at
            AND (OLD.expires_at IS NOT DISTINCT FROM NEW.expires_at OR OLD.expires_at > now()
                 OR current_setting('custody.given_time', true) = 'on')
        WHEN OLD.status = 'PENDING' THEN
            NEW.status = 'CLAIMED' AND OLD.attempts = NEW.attempts AND OLD.crashes = NEW.crashes
                AND OLD.releases = NEW.releases
            AND OLD.replays = NEW.replays AND OLD.available_at <= NEW.claimed_at
            AND (NEW.claimed_at BETWEEN now() - interval '1 s' AND clock_timestamp() + interval '1 s'
                 OR current_setting('custody.given_time', true) = 'on')
        WHEN OLD.status = 'CLAIMED' AND NEW.status = 'PUBLISHED' THEN
            OLD.attempts = NEW.attempts AND OLD.crashes = NEW.crashes AND OLD.releases = NEW.releases
                AND OLD.replays = NEW.replays
            AND (OLD.expires_at > now()
                 OR current_setting('custody.given_time', true) = 'on' AND OLD.expires_at > NEW.published_at)
        WHEN OLD.status = 'CLAIMED' THEN
            OLD.replays = NEW.replays AND NEW.crashes BETWEEN OLD.crashes AND OLD.crashes + 1
            AND CASE NEW.status
                WHEN 'PENDING' THEN (NEW.attempts - OLD.attempts, NEW.releases - OLD.releases) IN ((1, 0), (0, 1))
                ELSE NEW.attempts BETWEEN OLD.attempts AND OLD.attempts + 1 AND OLD.releases = NEW.releases END
        ELSE
            NEW.status = 'PENDING' AND NEW.attempts = 0 AND NEW.failures = 0 AND NEW.crashes = 0
                AND OLD.releases = NEW.releases
            AND NEW.replays = OLD.replays + (OLD.status = 'PUBLISHED')::int AND NEW.replayed_at IS NOT NULL
            AND (NEW.replayed_at > now() - interval '1 s' OR current_setting('custody.given_time', true) = 'on')
    END) IS NOT TRUE)
    EXECUTE FUNCTION custody.outbox_refused();

-- A UUID of version 7: the time in milliseconds, and 74 random bits. Such ids are neighbours in indexes, here and at
-- the target; each random id would touch another page.
CREATE FUNCTION custody.outbox_id() RETURNS uuid
LANGUAGE sql VOLATILE AS $$
    SELECT encode(set_bit(set_bit(
        overlay(uuid_send(gen_random_uuid()) PLACING substr(
            int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 3) FROM 1 FOR 6),
        52, 1), 53, 1), 'hex')::uuid
$$;

-- The lock of an ordering_key. All keys share 4,096 locks: with one for each, a transaction that writes many keys would
-- exhaust the lock table of the server.
CREATE FUNCTION custody.outbox_lock_of(p_key text) RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT hashtext(p_key) & 4095
$$;

-- Locks the keys that a transaction will write, until its end. The locks are taken in the order of their numbers, so
-- that two callers never deadlock if both call this before their first event. In the order of the keys they could,
-- because keys share locks.
CREATE FUNCTION custody.outbox_lock(p_keys text[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_lock int;
BEGIN
    FOR v_lock IN SELECT DISTINCT custody.outbox_lock_of(k) FROM unnest(p_keys) k WHERE k IS NOT NULL ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(hashtext('custody.outbox'), v_lock);
    END LOOP;
END $$;

-- Writes an event and returns its id. With an ordering_key the transaction first locks the key, until its end. So
-- events of one key are committed in the order of their ids.
CREATE FUNCTION custody.outbox_add(
    p_event_type text, p_kind text, p_payload bytea, p_destination text DEFAULT NULL, p_headers jsonb DEFAULT NULL,
    p_partition_key text DEFAULT NULL, p_ordering_key text DEFAULT NULL, p_available_at timestamptz DEFAULT NULL,
    p_event_id uuid DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
    v_route record := custody.outbox_route(p_destination, coalesce(p_ordering_key, p_partition_key));
    v_id    uuid := coalesce(p_event_id, custody.outbox_id());
BEGIN
    IF coalesce(p_event_type, '') = '' THEN
        PERFORM custody.refuse('invalid_argument', 'an event needs a type',
            'Give a name for what happened, such as order-placed.');
    ELSIF p_payload IS NULL THEN
        PERFORM custody.refuse('invalid_argument', 'an event needs a payload', 'JSON''s null is one: ''null''::jsonb.');
    ELSIF p_available_at < '0001-01-01Z' OR p_available_at >= '10000-01-01Z' THEN
        PERFORM custody.refuse('invalid_argument', format('an event cannot be available at %s', p_available_at),
            'Give a time in the years 1 to 9999.');
    ELSIF p_headers IS NOT NULL THEN        -- nested: a query in the condition above would cost every event
        IF jsonb_typeof(p_headers) <> 'object' OR EXISTS (
            SELECT FROM jsonb_each(CASE jsonb_typeof(p_headers) WHEN 'object' THEN p_headers END) h
            WHERE jsonb_typeof(h.value) <> 'string')
        THEN
            PERFORM custody.refuse('invalid_argument', 'headers are an object of texts',
                'For example {"source": "shop"}.');
        END IF;
    END IF;
    IF p_ordering_key IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtext('custody.outbox'), custody.outbox_lock_of(p_ordering_key));
    END IF;
    INSERT INTO custody.outbox
        (event_id, event_type, destination, kind, payload, headers, partition_key, ordering_key, created_at, topic_id,
         partition, available_at, first_due, updated_at)
    VALUES (v_id, p_event_type, coalesce(p_destination, ''), p_kind::"char", p_payload, p_headers, p_partition_key,
            p_ordering_key, v_now, v_route.topic_id, v_route.partition, coalesce(p_available_at, v_now),
            CASE WHEN p_available_at > v_now THEN p_available_at END, v_now)
    ON CONFLICT (event_id) DO NOTHING;
    IF NOT FOUND THEN
        PERFORM custody.refuse('outbox_refused', format('there is an event %s already', v_id),
            'Leave event_id out, or give a new one.');
    END IF;
    RETURN v_id;
END $$;

-- The same for plain SQL: a JSON payload.
CREATE FUNCTION custody.outbox_write(
    p_event_type text, p_payload jsonb, p_destination text DEFAULT NULL, p_headers jsonb DEFAULT NULL,
    p_partition_key text DEFAULT NULL, p_ordering_key text DEFAULT NULL, p_available_at timestamptz DEFAULT NULL,
    p_event_id uuid DEFAULT NULL
) RETURNS uuid
LANGUAGE sql VOLATILE AS $$
    SELECT custody.outbox_add(p_event_type, 'j', convert_to(p_payload::text, 'UTF8'), p_destination, p_headers,
                              p_partition_key, p_ordering_key, p_available_at, p_event_id)
$$;

-- The time from which the age of an event counts: its last replay, the time that it was written for, or when it was
-- written.
CREATE FUNCTION custody.outbox_waits_since(p_event custody.outbox) RETURNS timestamptz
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(p_event.replayed_at, p_event.first_due, p_event.created_at)
$$;

-- Which of these events may be published now: those without an ordering_key, and those before which only events of this
-- list are open in their key. An event whose claim is not committed yet is still open here, and holds back those behind
-- it. So the caller locks its events first, in a statement of its own.
CREATE FUNCTION custody.outbox_in_order(p_ids bigint[], p_hold boolean DEFAULT false) RETURNS bigint[]
LANGUAGE sql VOLATILE AS $$
    WITH mine AS MATERIALIZED (
        SELECT o.id, o.ordering_key, o.destination, o.topic_id, row_number() OVER w AS place,
               count(*) OVER (PARTITION BY o.ordering_key, o.destination) AS events
        -- A join with them may read the primary key from its beginning.
        FROM custody.outbox o WHERE o.id = ANY (p_ids)
        WINDOW w AS (PARTITION BY o.ordering_key, o.destination ORDER BY o.id)
    ), open AS MATERIALIZED (
        SELECT e.id, row_number() OVER (PARTITION BY m.ordering_key, m.destination ORDER BY e.id) AS place
        FROM mine m
        CROSS JOIN LATERAL (
            SELECT o.id FROM custody.outbox o
            -- Compared as rows, and in their order, so that the index of the keys is used. With `=` and the id alone a
            -- plan could read the primary key, with all published events.
            WHERE (o.ordering_key, o.destination, o.id) > (m.ordering_key, m.destination, 0)
              AND (o.ordering_key, o.destination) <= (m.ordering_key, m.destination)
              AND o.ordering_key IS NOT NULL AND o.published_at IS NULL AND (p_hold OR o.ended_at IS NULL)
              -- A topic that was made anew is another one. It is a CASE, which the planner expects to be true:
              -- otherwise it would read a whole key.
              AND CASE WHEN o.topic_id IS NOT DISTINCT FROM m.topic_id THEN true ELSE false END
            ORDER BY o.ordering_key, o.destination, o.id LIMIT m.events) e
        WHERE m.place = 1 AND m.ordering_key IS NOT NULL
    )
    -- If an event has the same place among the open events of its key as among ours, all before it are ours.
    SELECT coalesce(array_agg(m.id ORDER BY m.id), '{}')
    FROM mine m LEFT JOIN open e ON e.id = m.id AND e.place = m.place
    WHERE m.ordering_key IS NULL OR e.id IS NOT NULL
$$;
