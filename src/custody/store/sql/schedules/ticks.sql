-- Ticks: the messages of schedules. Any number of processes may publish what is due. Each tick is published once: the
-- message and the schedule's next time are one transaction, and it is fenced by the revision that was read.

-- When a schedule is to be looked at: at its next tick, and after a failure not for ten seconds.
CREATE FUNCTION custody.tick_at(p_schedule custody.schedules) RETURNS timestamptz
LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest((p_schedule).next_at, (p_schedule).failed_at + interval '10 seconds')
$$;

-- Seconds until the next tick, not above zero if one is due; null if there is none. Every worker asks once a second.
CREATE FUNCTION custody.next_tick(p_now timestamptz DEFAULT NULL) RETURNS double precision
LANGUAGE sql VOLATILE AS $$
    SELECT extract(epoch FROM min(custody.tick_at(s)) - coalesce(p_now, clock_timestamp()))::double precision
    FROM custody.schedules s WHERE s.paused_at IS NULL
$$;

CREATE FUNCTION custody.due_schedules(p_now timestamptz DEFAULT NULL) RETURNS TABLE (
    name text, revision bigint, topic text, every interval, cron text, tz text, missed text, next_at timestamptz,
    now timestamptz)
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := coalesce(p_now, clock_timestamp());
BEGIN
    RETURN QUERY
    SELECT s.name, s.revision, s.topic, s.every, s.cron, s.tz, s.missed, s.next_at, v_now
    FROM custody.schedules s WHERE s.paused_at IS NULL AND custody.tick_at(s) <= v_now ORDER BY s.next_at, s.name;
END $$;

-- Publishes a message for each of p_headers, which are added to those of the schedule. Without a key all go to one
-- partition, in this order. Heads are locked after the schedule.
CREATE FUNCTION custody.publish_of(p_schedule custody.schedules, p_headers text[], p_now timestamptz)
RETURNS TABLE (partition int, "offset" bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_topic custody.topics := custody.topic_named((p_schedule).topic);
    v_place int := custody.place(v_topic, coalesce((p_schedule).key, (p_schedule).name));
BEGIN
    RETURN QUERY
    WITH ticks AS (
        SELECT array_agg(v_place) AS places, array_agg((p_schedule).key) AS keys,
               array_agg((p_schedule).kind::text) AS kinds, array_agg((p_schedule).payload) AS payloads,
               array_agg((coalesce((p_schedule).headers, '{}') || h.given::jsonb)::text ORDER BY h.n) AS headers
        FROM unnest(p_headers) WITH ORDINALITY h (given, n))
    SELECT r.partition, r."offset"
    FROM ticks t, custody.publish(v_topic.name, t.places, t.keys, t.kinds, t.payloads, t.headers, p_now => p_now,
                                  p_of => v_topic.partitions) r;
END $$;

-- Publishes the ticks of these times. Returns nothing if somebody else does it or did it, or changed the schedule.
CREATE FUNCTION custody.publish_ticks(
    p_name text, p_revision bigint, p_times timestamptz[], p_headers text[], p_next_at timestamptz,
    p_now timestamptz DEFAULT NULL
) RETURNS TABLE (partition int, "offset" bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_schedule custody.schedules;
BEGIN
    PERFORM custody.require_read_committed();
    SELECT * INTO v_schedule FROM custody.schedules s
    WHERE s.name = p_name AND s.revision = p_revision AND s.paused_at IS NULL FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    UPDATE custody.schedules s SET
        revision = s.revision + 1, last_at = p_times[cardinality(p_times)], next_at = p_next_at, failed_at = NULL,
        last_error = NULL
    WHERE s.name = p_name;
    RETURN QUERY SELECT * FROM custody.publish_of(v_schedule, p_headers, p_now);
END $$;

-- Records why the due tick could not be published. It stays due.
CREATE FUNCTION custody.fail_tick(p_name text, p_revision bigint, p_error text, p_now timestamptz DEFAULT NULL)
RETURNS void
LANGUAGE sql AS $$
    UPDATE custody.schedules s SET failed_at = coalesce(p_now, clock_timestamp()), last_error = left(p_error, 2000)
    WHERE s.name = p_name AND s.revision = p_revision
$$;

-- Publishes a message now, also of a paused schedule. Its times stay as they are.
CREATE FUNCTION custody.run_schedule(p_name text, p_headers text, p_now timestamptz DEFAULT NULL)
RETURNS TABLE (partition int, "offset" bigint)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM custody.require_read_committed();
    RETURN QUERY SELECT * FROM custody.publish_of(custody.schedule_named(p_name), ARRAY[p_headers], p_now);
END $$;
