-- Segments end and go. Retention never passes an unresolved message, and keeps the events of dead ones aside.

-- Ends the current segment of a topic and opens the next one.
CREATE FUNCTION custody.seal_segment(p_topic text, p_now timestamptz DEFAULT NULL) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    v_now     timestamptz;
    v_topic   custody.topics := custody.lock_topic(p_topic);
    v_head    custody.heads;
    v_segment int;
BEGIN
    PERFORM 1 FROM custody.heads WHERE topic_id = v_topic.topic_id ORDER BY partition FOR UPDATE;
    v_now := coalesce(p_now, clock_timestamp());
    UPDATE custody.segments SET sealed_at = v_now WHERE topic_id = v_topic.topic_id AND sealed_at IS NULL;
    v_segment := custody.open_segment(v_topic.topic_id, v_now);
    FOR v_head IN SELECT * FROM custody.heads WHERE topic_id = v_topic.topic_id ORDER BY partition LOOP
        INSERT INTO custody.segment_bounds VALUES (v_segment, v_head.partition, (custody.tail(v_head)).next_offset);
    END LOOP;
    UPDATE custody.heads h SET segment_id = v_segment, segment_start = b.first_offset
    FROM custody.segment_bounds b
    WHERE h.topic_id = v_topic.topic_id AND b.segment_id = v_segment AND b.partition = h.partition;
    RETURN v_segment;
END $$;

-- Drops the sealed segments, oldest first, that were sealed before p_before and hold nothing unresolved. Returns each
-- segment that it looked at; the last one may be kept, and then says which group holds it.
CREATE FUNCTION custody.drop_segments(p_topic text, p_before timestamptz DEFAULT 'infinity', p_now timestamptz DEFAULT NULL)
RETURNS TABLE (segment_id int, dropped boolean, kept_events bigint, held_by text)
LANGUAGE plpgsql AS $$
DECLARE
    -- create_group and rewind take this lock too: nobody can be placed on what is about to go
    v_topic   custody.topics := custody.lock_topic(p_topic);
    v_segment custody.segments;
    v_timeout text := current_setting('lock_timeout');
BEGIN
    -- a claim reads the log under its cursor, and a redrive makes a dead message unresolved under it
    PERFORM 1 FROM custody.cursors c JOIN custody.groups g USING (group_id) WHERE g.topic_id = v_topic.topic_id
        ORDER BY c.group_id, c.partition FOR UPDATE OF c;
    PERFORM 1 FROM custody.heads WHERE topic_id = v_topic.topic_id ORDER BY partition FOR UPDATE;
    -- what was kept for a dead letter that has been redriven and is done by now
    DELETE FROM custody.kept_events k
    WHERE k.topic_id = v_topic.topic_id
      AND NOT EXISTS (SELECT FROM custody.groups g JOIN custody.cases c USING (group_id)
                      WHERE g.topic_id = k.topic_id AND c.partition = k.partition AND c."offset" = k."offset");
    FOR v_segment IN
        SELECT * FROM custody.segments s WHERE s.topic_id = v_topic.topic_id AND s.sealed_at < p_before AND s.dropped_at IS NULL ORDER BY s.segment_id
    LOOP
        segment_id := v_segment.segment_id;
        kept_events := 0;
        SELECT format('group %s, partition %s, offset %s', g.name, n.partition, x.lowest) INTO held_by
        FROM custody.groups g
        CROSS JOIN custody.heads n
        CROSS JOIN LATERAL custody.position(g.group_id, n.partition) f
        CROSS JOIN LATERAL (SELECT coalesce(lower(custody.unresolved(f, true)), f.frontier) AS lowest) x
        WHERE g.topic_id = v_topic.topic_id AND n.topic_id = v_topic.topic_id
          AND x.lowest < custody.segment_end(v_segment, n.partition)
        ORDER BY g.name, n.partition LIMIT 1;
        dropped := held_by IS NULL;
        IF NOT dropped THEN
            RETURN NEXT;
            RETURN;
        END IF;
        EXECUTE format(
            'INSERT INTO custody.kept_events
             SELECT DISTINCT $1, e.segment_id, e.partition, e."offset", e.published_at, e.key, e.kind, e.payload, e.headers
             FROM custody.groups g JOIN custody.cases c USING (group_id) JOIN custody.log_%s e USING (partition, "offset")
             WHERE g.topic_id = $1 AND c.state = ''dead''
             ON CONFLICT DO NOTHING', v_segment.segment_id) USING v_topic.topic_id;
        GET DIAGNOSTICS kept_events = ROW_COUNT;
        UPDATE custody.heads h SET first_offset = custody.segment_end(v_segment, h.partition) WHERE h.topic_id = v_topic.topic_id;
        -- a long reader of the log holds its tables: better no drop this time than everybody queueing behind ours
        PERFORM set_config('lock_timeout', '200ms', true);
        EXECUTE format('ALTER TABLE custody.log DETACH PARTITION custody.log_%s', v_segment.segment_id);
        EXECUTE format('DROP TABLE custody.log_%s', v_segment.segment_id);
        PERFORM set_config('lock_timeout', v_timeout, true);
        UPDATE custody.segments s SET dropped_at = coalesce(p_now, clock_timestamp()) WHERE s.segment_id = v_segment.segment_id;
        RETURN NEXT;
    END LOOP;
END $$;

-- The first offset of a partition that lies beyond a segment.
CREATE FUNCTION custody.segment_end(p_segment custody.segments, p_partition int) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT b.first_offset FROM custody.segment_bounds b JOIN custody.segments s USING (segment_id)
    WHERE s.topic_id = (p_segment).topic_id AND b.partition = p_partition AND b.segment_id > (p_segment).segment_id
    ORDER BY b.segment_id LIMIT 1
$$;
