-- Schedules: create, change, pause, resume, delete and describe. Clients compute the times: PostgreSQL knows no cron
-- expressions. Whoever changes a schedule names the revision that it read.

-- The time by the clock that counts.
CREATE FUNCTION custody.time(p_now timestamptz DEFAULT NULL) RETURNS timestamptz
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(p_now, clock_timestamp())
$$;

CREATE FUNCTION custody.schedule_named(p_name text) RETURNS custody.schedules
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_schedule custody.schedules;
BEGIN
    SELECT * INTO v_schedule FROM custody.schedules WHERE name = p_name;
    IF NOT FOUND THEN
        PERFORM custody.refuse('schedule_not_found', format('there is no schedule %L', p_name),
            'Look at the list of schedules for the right spelling.');
    END IF;
    RETURN v_schedule;
END $$;

CREATE FUNCTION custody.create_schedule(
    p_name text, p_topic text, p_every interval, p_cron text, p_tz text, p_missed text, p_key text, p_kind text,
    p_payload bytea, p_headers text, p_declared text, p_app text, p_next_at timestamptz,
    p_now timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM custody.require_read_committed();
    PERFORM custody.topic_named(p_topic);
    INSERT INTO custody.schedules (name, topic, every, cron, tz, missed, key, kind, payload, headers, declared, app,
                                   next_at, created_at)
    VALUES (p_name, p_topic, p_every, p_cron, p_tz, p_missed, p_key, p_kind::"char", p_payload, p_headers::jsonb,
            p_declared::json, p_app, p_next_at, coalesce(p_now, clock_timestamp()))
    ON CONFLICT (name) DO NOTHING;
    IF NOT FOUND THEN
        PERFORM custody.refuse('schedule_exists', format('there is a schedule %L already', p_name),
            'Choose another name, or change that one (change_schedule, ensure_schedule).');
    END IF;
END $$;

-- Sets all settings. False if the schedule has another revision by now. Without p_declared the change is an operator's.
CREATE FUNCTION custody.change_schedule(
    p_name text, p_revision bigint, p_topic text, p_every interval, p_cron text, p_tz text, p_missed text, p_key text,
    p_kind text, p_payload bytea, p_headers text, p_declared text, p_app text, p_next_at timestamptz
) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_done boolean;
BEGIN
    PERFORM custody.require_read_committed();
    PERFORM custody.topic_named(p_topic);
    UPDATE custody.schedules s SET
        revision = s.revision + 1, topic = p_topic, every = p_every, cron = p_cron, tz = p_tz, missed = p_missed,
        key = p_key, kind = p_kind::"char", payload = p_payload, headers = p_headers::jsonb,
        declared = coalesce(p_declared::json, s.declared), app = coalesce(p_app, s.app), next_at = p_next_at,
        failed_at = NULL, last_error = NULL
    WHERE s.name = p_name AND s.revision = p_revision;
    v_done := FOUND;
    PERFORM custody.schedule_named(p_name);
    RETURN v_done;
END $$;

-- False if it was paused already.
CREATE FUNCTION custody.pause_schedule(p_name text, p_reason text DEFAULT NULL, p_now timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_done boolean;
BEGIN
    PERFORM custody.require_read_committed();
    UPDATE custody.schedules s SET
        revision = s.revision + 1, paused_at = coalesce(p_now, clock_timestamp()), paused_reason = p_reason
    WHERE s.name = p_name AND s.paused_at IS NULL;
    v_done := FOUND;
    PERFORM custody.schedule_named(p_name);
    RETURN v_done;
END $$;

-- False if the schedule has another revision by now.
CREATE FUNCTION custody.resume_schedule(p_name text, p_revision bigint, p_next_at timestamptz) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM custody.require_read_committed();
    UPDATE custody.schedules s SET
        revision = s.revision + 1, paused_at = NULL, paused_reason = NULL, failed_at = NULL, last_error = NULL,
        next_at = p_next_at
    WHERE s.name = p_name AND s.revision = p_revision;
    RETURN FOUND;
END $$;

CREATE FUNCTION custody.delete_schedule(p_name text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM custody.require_read_committed();
    DELETE FROM custody.schedules WHERE name = p_name;
    IF NOT FOUND THEN
        PERFORM custody.schedule_named(p_name);
    END IF;
END $$;

-- Records that processes of an app run, and so will handle these schedules, until then. Rows that a tick holds are left
-- out: the next call is soon enough. Returns the schedules of the app that it did not name.
CREATE FUNCTION custody.attend_schedules(
    p_app text, p_names text[], p_timeout interval, p_now timestamptz DEFAULT NULL
) RETURNS SETOF text
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM custody.require_read_committed();
    WITH held AS MATERIALIZED (
        SELECT s.name FROM custody.schedules s WHERE s.app = p_app AND s.name = ANY (p_names)
        ORDER BY s.name FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE custody.schedules s SET attended_until = coalesce(p_now, clock_timestamp()) + p_timeout
    FROM held h WHERE s.name = h.name;
    RETURN QUERY SELECT s.name FROM custody.schedules s WHERE s.app = p_app AND s.name <> ALL (p_names) ORDER BY s.name;
END $$;

-- All schedules, or one, and the state of each:
--   paused       by an operator
--   failing      its last tick could not be published
--   late         a tick has been due for a minute: no worker and no server runs
--   unattended   no process of its app runs, or none that has code for it: nobody handles its ticks
--   active
CREATE FUNCTION custody.describe_schedules(p_name text DEFAULT NULL, p_now timestamptz DEFAULT NULL) RETURNS TABLE (
    name text, revision bigint, topic text, every interval, cron text, tz text, missed text, key text, kind "char",
    payload bytea, headers jsonb, declared json, app text, attended_until timestamptz, next_at timestamptz,
    last_at timestamptz, paused_at timestamptz, paused_reason text, failed_at timestamptz, last_error text,
    created_at timestamptz, state text, now timestamptz)
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := coalesce(p_now, clock_timestamp());
BEGIN
    IF p_name IS NOT NULL THEN
        PERFORM custody.schedule_named(p_name);
    END IF;
    RETURN QUERY
    SELECT s.name, s.revision, s.topic, s.every, s.cron, s.tz, s.missed, s.key, s.kind, s.payload, s.headers,
           s.declared, s.app, s.attended_until, s.next_at, s.last_at, s.paused_at, s.paused_reason, s.failed_at,
           s.last_error, s.created_at,
           CASE WHEN s.paused_at IS NOT NULL THEN 'paused'
                WHEN s.failed_at IS NOT NULL THEN 'failing'
                WHEN s.next_at <= v_now - interval '1 minute' THEN 'late'
                WHEN s.app IS NOT NULL AND coalesce(s.attended_until <= v_now, true) THEN 'unattended'
                ELSE 'active' END,
           v_now
    FROM custody.schedules s WHERE p_name IS NULL OR s.name = p_name ORDER BY s.name;
END $$;
