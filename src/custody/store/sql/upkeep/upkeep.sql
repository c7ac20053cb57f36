-- Retention of a topic, and the upkeep that enforces it. No process has to run: workers, pipelines and `custody
-- maintain` do a step at a time, each in its own transaction, and none of them waits for long.

CREATE FUNCTION custody.set_retention(
    p_topic text, p_time interval DEFAULT NULL, p_bytes bigint DEFAULT NULL, p_segment_time interval DEFAULT NULL,
    p_segment_bytes bigint DEFAULT NULL, p_drop_unresolved boolean DEFAULT false
) RETURNS custody.topics
LANGUAGE plpgsql AS $$
DECLARE
    v_topic custody.topics := custody.lock_topic(p_topic);
BEGIN
    IF p_time <= '0' OR p_bytes <= 0 OR p_segment_time <= '0' OR p_segment_bytes <= 0 THEN
        PERFORM custody.refuse('invalid_argument', 'times and sizes of a retention are positive',
            'Leave out what shall not count.');
    ELSIF p_time IS NULL AND p_bytes IS NULL
        AND (p_segment_time IS NOT NULL OR p_segment_bytes IS NOT NULL OR p_drop_unresolved) THEN
        PERFORM custody.refuse('invalid_argument', 'a retention needs a time or a size');
    END IF;
    UPDATE custody.topics t SET
        retention_time = p_time, retention_bytes = p_bytes, drop_unresolved = p_drop_unresolved,
        -- A tenth of what is kept, within bounds: a segment is a table, and only whole segments are dropped.
        segment_time = coalesce(p_segment_time,
                                CASE WHEN p_time IS NOT NULL THEN greatest(p_time / 10, '1 minute') END),
        segment_bytes = coalesce(p_segment_bytes,
                                 CASE WHEN p_bytes IS NOT NULL THEN greatest(p_bytes / 10, 1048576) END)
    WHERE t.topic_id = v_topic.topic_id
    RETURNING t.* INTO v_topic;
    RETURN v_topic;
END $$;

CREATE FUNCTION custody.segment_bytes(p_segment_id int) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(pg_total_relation_size(to_regclass('custody.log_' || p_segment_id)), 0)
$$;

CREATE FUNCTION custody.segment_messages(p_segment custody.segments) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(coalesce(custody.segment_end(p_segment, h.partition), (custody.tail(h)).next_offset)
                        - b.first_offset), 0)::bigint
    FROM custody.heads h
    JOIN custody.segment_bounds b ON b.segment_id = (p_segment).segment_id AND b.partition = h.partition
    WHERE h.topic_id = (p_segment).topic_id
$$;

-- What one step did: sealed, dropped, held (and what holds it), or busy: somebody had a lock that it needed, so it gave
-- up.
CREATE TYPE custody.upkeep AS (
    topic text, did text, segment int, messages bigint, bytes bigint, kept bigint, lost bigint,
    held_group text, held_partition int, held_offset bigint
);

-- One step for one topic; no row if there is nothing to do. Call it again while it returns sealed or dropped. It waits
-- for no lock longer than its timeout. Others wait while it drops, and the longer the more partitions and groups there
-- are.
CREATE FUNCTION custody.maintain(p_topic text, p_now timestamptz DEFAULT NULL) RETURNS SETOF custody.upkeep
LANGUAGE plpgsql SET lock_timeout = '100ms' AS $$
DECLARE
    v_now     timestamptz := coalesce(p_now, clock_timestamp());
    v_topic   custody.topics := custody.topic_named(p_topic);
    v_segment custody.segments;
    v_done    custody.upkeep;
BEGIN
    PERFORM custody.require_read_committed();
    IF v_topic.retention_time IS NULL AND v_topic.retention_bytes IS NULL THEN
        RETURN;
    END IF;
    v_done.topic := p_topic;
    BEGIN
        -- Those who maintain a topic do not wait for one another, nor for those who place a group on it.
        PERFORM 1 FROM custody.topics WHERE topic_id = v_topic.topic_id FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RAISE lock_not_available;
        END IF;
        SELECT * INTO v_segment FROM custody.segments s WHERE s.topic_id = v_topic.topic_id AND s.sealed_at IS NULL;
        v_done.segment := v_segment.segment_id;
        v_done.bytes := custody.segment_bytes(v_segment.segment_id);
        IF v_done.bytes >= v_topic.segment_bytes OR v_segment.created_at <= v_now - v_topic.segment_time THEN
            v_done.messages := custody.segment_messages(v_segment);
            IF v_done.messages > 0 THEN
                PERFORM custody.seal_segment(p_topic, p_now);
                v_done.did := 'sealed';
                RETURN NEXT v_done;
                RETURN;
            END IF;
        END IF;
        SELECT * INTO v_segment FROM custody.segments s
        WHERE s.topic_id = v_topic.topic_id AND s.dropped_at IS NULL AND s.sealed_at IS NOT NULL
        ORDER BY s.segment_id LIMIT 1;
        IF NOT FOUND OR NOT custody.beyond_retention(v_topic, v_segment, v_now) THEN
            RETURN;
        END IF;
        v_done.segment := v_segment.segment_id;
        v_done.bytes := custody.segment_bytes(v_segment.segment_id);
        v_done.messages := custody.segment_messages(v_segment);
        v_done := custody.drop_unless_held(v_topic, v_segment, v_done, p_now);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        v_done.did := 'busy';
    END;
    RETURN NEXT v_done;
END $$;

-- A segment is sealed after its newest message was published. So when it was sealed that long ago, all of it is older.
CREATE FUNCTION custody.beyond_retention(p_topic custody.topics, p_segment custody.segments, p_now timestamptz)
RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce((p_segment).sealed_at <= p_now - (p_topic).retention_time, false)
        OR coalesce((p_topic).retention_bytes < (SELECT sum(custody.segment_bytes(s.segment_id)) FROM custody.segments s
                                                 WHERE s.topic_id = (p_topic).topic_id AND s.dropped_at IS NULL), false)
$$;

-- Tables are locked before rows: while this waits for a long reader of the log, no claim and no publish waits for it.
CREATE FUNCTION custody.drop_unless_held(
    p_topic custody.topics, p_segment custody.segments, p_done custody.upkeep, p_now timestamptz
)
RETURNS custody.upkeep
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_holder record;
BEGIN
    -- First a check without locks: a group that is stuck for a week must not cost the others a lock every half minute.
    SELECT * INTO v_holder FROM custody.segment_holder(p_segment, false);
    IF v_holder.held_group IS NULL OR (p_topic).drop_unresolved THEN
        PERFORM custody.forget_kept((p_topic).topic_id);
        EXECUTE format('LOCK TABLE ONLY custody.log, ONLY custody.log_%s IN ACCESS EXCLUSIVE MODE',
            (p_segment).segment_id);
        PERFORM custody.lock_cursors_and_heads((p_topic).topic_id);
        IF (p_topic).drop_unresolved THEN
            PERFORM custody.fold_segment(p_segment, coalesce(p_now, clock_timestamp()));
        END IF;
        SELECT * INTO v_holder FROM custody.segment_holder(p_segment, (p_topic).drop_unresolved);
    END IF;
    IF v_holder.held_group IS NOT NULL THEN
        p_done.did := 'held';
        p_done.held_group := v_holder.held_group;
        p_done.held_partition := v_holder.held_partition;
        p_done.held_offset := v_holder.held_offset;
        RETURN p_done;
    END IF;
    p_done.lost := CASE WHEN (p_topic).drop_unresolved
                        THEN custody.pass_segment(p_segment, coalesce(p_now, clock_timestamp())) ELSE 0 END;
    p_done.kept := custody.remove_segment(p_segment, p_now);
    p_done.did := 'dropped';
    RETURN p_done;
END $$;

-- The topics that have a retention.
CREATE FUNCTION custody.maintained_topics() RETURNS SETOF text
LANGUAGE sql STABLE AS $$
    SELECT name FROM custody.topics WHERE retention_time IS NOT NULL OR retention_bytes IS NOT NULL ORDER BY name
$$;

-- The segments of a topic, the oldest first, and what holds the oldest one, or would hold it if it were sealed.
CREATE FUNCTION custody.describe_segments(p_topic text)
RETURNS TABLE (
    segment int, created_at timestamptz, sealed_at timestamptz, messages bigint, bytes bigint, from_time timestamptz,
    until_time timestamptz, held_group text, held_partition int, held_offset bigint
)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_topic   custody.topics := custody.topic_named(p_topic);
    v_segment custody.segments;
    v_first   boolean := true;
BEGIN
    FOR v_segment IN SELECT * FROM custody.segments s WHERE s.topic_id = v_topic.topic_id AND s.dropped_at IS NULL
        ORDER BY s.segment_id LOOP
        segment := v_segment.segment_id;
        created_at := v_segment.created_at;
        sealed_at := v_segment.sealed_at;
        messages := custody.segment_messages(v_segment);
        bytes := custody.segment_bytes(segment);
        EXECUTE format(
            'SELECT min(f.published_at), max(l.published_at)
             FROM custody.heads h
             CROSS JOIN LATERAL (SELECT published_at FROM custody.log_%1$s WHERE partition = h.partition
                                 ORDER BY "offset" LIMIT 1) f
             CROSS JOIN LATERAL (SELECT published_at FROM custody.log_%1$s WHERE partition = h.partition
                                 ORDER BY "offset" DESC LIMIT 1) l
             WHERE h.topic_id = $1', segment) INTO from_time, until_time USING v_topic.topic_id;
        held_group := NULL;
        held_partition := NULL;
        held_offset := NULL;
        IF v_first AND v_segment.sealed_at IS NOT NULL THEN
            SELECT x.held_group, x.held_partition, x.held_offset INTO held_group, held_partition, held_offset
            FROM custody.segment_holder(v_segment, v_topic.drop_unresolved) x;
        END IF;
        v_first := false;
        RETURN NEXT;
    END LOOP;
END $$;

-- How many dead messages are kept for a topic, and their size.
CREATE FUNCTION custody.kept_aside(p_topic text, OUT events bigint, OUT bytes bigint)
LANGUAGE sql STABLE AS $$
    SELECT count(*), coalesce(sum(pg_column_size(k.*)), 0)::bigint
    FROM custody.kept_events k WHERE k.topic_id = (custody.topic_named(p_topic)).topic_id
$$;
