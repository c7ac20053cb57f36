-- Segments are sealed and dropped. Retention never passes an unresolved message unless the topic allows it, and it
-- keeps dead messages.

-- Seals the open segment of a topic and opens the next one.
CREATE FUNCTION custody.seal_segment(p_topic text, p_now timestamptz DEFAULT NULL) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_topic   custody.topics := custody.lock_topic(p_topic);
    v_now     timestamptz := coalesce(p_now, clock_timestamp());
    v_head    custody.heads;
    v_segment int;
    v_sealed  int;
BEGIN
    -- The new table is created before publishers have to wait.
    UPDATE custody.segments SET sealed_at = v_now WHERE topic_id = v_topic.topic_id AND sealed_at IS NULL
    RETURNING segment_id INTO v_sealed;
    v_segment := custody.open_segment(v_topic.topic_id, v_now);
    PERFORM 1 FROM custody.heads WHERE topic_id = v_topic.topic_id ORDER BY partition FOR UPDATE;
    UPDATE custody.segments SET sealed_at = coalesce(p_now, clock_timestamp()) WHERE segment_id = v_sealed;
    FOR v_head IN SELECT * FROM custody.heads WHERE topic_id = v_topic.topic_id ORDER BY partition LOOP
        INSERT INTO custody.segment_bounds VALUES (v_segment, v_head.partition, (custody.tail(v_head)).next_offset);
    END LOOP;
    UPDATE custody.heads h SET segment_id = v_segment, segment_start = b.first_offset
    FROM custody.segment_bounds b
    WHERE h.topic_id = v_topic.topic_id AND b.segment_id = v_segment AND b.partition = h.partition;
    EXECUTE format('DROP FUNCTION custody.append_%s', v_sealed);
    RETURN v_segment;
END $$;

-- The first offset of a partition behind a segment.
CREATE FUNCTION custody.segment_end(p_segment custody.segments, p_partition int) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT b.first_offset FROM custody.segment_bounds b JOIN custody.segments s USING (segment_id)
    WHERE s.topic_id = (p_segment).topic_id AND b.partition = p_partition AND b.segment_id > (p_segment).segment_id
    ORDER BY b.segment_id LIMIT 1
$$;

-- The lowest offset from p_from on that a group has not resolved: its frontier, if nothing below that is open.
CREATE FUNCTION custody.lowest_unresolved(p_at custody.frontiers, p_from bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT least(
        (SELECT min(lower(l.held * int8multirange(int8range(p_from, NULL)))) FROM custody.leases l
         WHERE l.group_id = (p_at).group_id AND l.partition = (p_at).partition AND l.claim_no >= (p_at).oldest_claim),
        (SELECT min(lower(r.ranges * int8multirange(int8range(p_from, NULL)))) FROM custody.returned r
         WHERE r.group_id = (p_at).group_id AND r.partition = (p_at).partition),
        (SELECT c."offset" FROM custody.cases c
         WHERE c.group_id = (p_at).group_id AND c.partition = (p_at).partition AND c."offset" >= p_from
           AND (c.state <> 'dead' OR c.held)
         ORDER BY c."offset" LIMIT 1),
        (SELECT min(p.first_offset) FROM custody.parked p
         WHERE p.group_id = (p_at).group_id AND p.partition = (p_at).partition),
        (p_at).frontier)
$$;

-- What keeps a segment from being dropped; null if nothing does. If the topic lets retention pass unresolved messages,
-- only messages in flight hold it: no worker loses its messages.
CREATE FUNCTION custody.segment_holder(
    p_segment custody.segments, p_in_flight_only boolean, OUT held_group text, OUT held_partition int,
    OUT held_offset bigint
)
LANGUAGE sql STABLE AS $$
    SELECT g.name, h.partition, x.lowest
    FROM custody.heads h
    CROSS JOIN custody.groups g
    CROSS JOIN LATERAL custody.position(g.group_id, h.partition) f
    CROSS JOIN LATERAL (SELECT custody.segment_end(p_segment, h.partition) AS until OFFSET 0) e
    CROSS JOIN LATERAL (
        SELECT CASE WHEN NOT p_in_flight_only THEN custody.lowest_unresolved(f, h.first_offset)
               ELSE (SELECT min(lower(l.held * int8multirange(int8range(h.first_offset, NULL)))) FROM custody.leases l
                     WHERE l.group_id = f.group_id AND l.partition = f.partition
                       AND l.claim_no >= f.oldest_claim) END AS lowest) x
    WHERE h.topic_id = (p_segment).topic_id AND g.topic_id = (p_segment).topic_id AND x.lowest < e.until
    ORDER BY g.name, h.partition LIMIT 1
$$;

-- Locks all cursors and heads of a topic. A claim reads the log under its cursor, a redrive reopens a dead message
-- under it, and a publish holds its heads. So after this only settles are under way.
CREATE FUNCTION custody.lock_cursors_and_heads(p_topic_id int) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM custody.cursors c JOIN custody.groups g USING (group_id) WHERE g.topic_id = p_topic_id
        ORDER BY c.group_id, c.partition FOR UPDATE OF c;
    PERFORM 1 FROM custody.heads WHERE topic_id = p_topic_id ORDER BY partition FOR UPDATE;
END $$;

-- Deletes what was kept for dead letters that were redriven and are done. It needs no lock: a message below the first
-- offset never gets a case again.
CREATE FUNCTION custody.forget_kept(p_topic_id int) RETURNS void
LANGUAGE sql SET enable_seqscan = off AS $$
    DELETE FROM custody.kept_events k
    WHERE k.topic_id = p_topic_id
      AND NOT EXISTS (SELECT FROM custody.groups g JOIN custody.cases c USING (group_id)
                      WHERE g.topic_id = k.topic_id AND c.partition = k.partition AND c."offset" = k."offset")
$$;

-- Drops a segment that nothing holds, and returns how many messages were kept. The caller holds the topic, its cursors
-- and its heads. PostgreSQL removes the file after the commit, when the locks are released; only the catalog is changed
-- under them.
CREATE FUNCTION custody.remove_segment(p_segment custody.segments, p_now timestamptz) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_topic_id int := (p_segment).topic_id;
    v_timeout  text := current_setting('lock_timeout');
    v_kept     bigint;
BEGIN
    INSERT INTO custody.kept_events
    SELECT DISTINCT ON (c.partition, c."offset") v_topic_id, (p_segment).segment_id, c.partition, c."offset",
           c.published_at, c.key, c.kind, c.payload, c.headers
    FROM custody.groups g
    JOIN custody.segment_bounds b ON b.segment_id = (p_segment).segment_id
    JOIN custody.cases c ON c.group_id = g.group_id AND c.partition = b.partition AND c."offset" >= b.first_offset
        AND c."offset" < custody.segment_end(p_segment, b.partition) AND c.state = 'dead'
    WHERE g.topic_id = v_topic_id
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    UPDATE custody.heads h SET first_offset = custody.segment_end(p_segment, h.partition) WHERE h.topic_id = v_topic_id;
    -- A long reader of the log holds its tables. It is better not to drop now than to make everybody queue behind this.
    PERFORM set_config('lock_timeout', '200ms', true);
    EXECUTE format('ALTER TABLE custody.log DETACH PARTITION custody.log_%s', (p_segment).segment_id);
    EXECUTE format('DROP TABLE custody.log_%1$s; DROP FUNCTION custody.slices_%1$s(int, bigint, bigint), '
                   'custody.slices_%1$s(int, int8multirange), custody.keys_%1$s',
                   (p_segment).segment_id);
    PERFORM set_config('lock_timeout', v_timeout, true);
    UPDATE custody.segments s SET dropped_at = coalesce(p_now, clock_timestamp())
    WHERE s.segment_id = (p_segment).segment_id;
    -- A dropped segment has a row only as long as messages of it are kept.
    DELETE FROM custody.segment_bounds b USING custody.segments s
    WHERE s.topic_id = v_topic_id AND s.dropped_at IS NOT NULL AND b.segment_id = s.segment_id;
    DELETE FROM custody.segments s
    WHERE s.topic_id = v_topic_id AND s.dropped_at IS NOT NULL
      AND NOT EXISTS (SELECT FROM custody.kept_events k WHERE k.segment_id = s.segment_id);
    RETURN v_kept;
END $$;

-- By hand: drops sealed segments, the oldest first, that were sealed before p_before and have nothing unresolved.
-- Returns each segment that it checked. The last one may be kept, and then has the group that holds it.
CREATE FUNCTION custody.drop_segments(
    p_topic text, p_before timestamptz DEFAULT 'infinity', p_now timestamptz DEFAULT NULL
)
RETURNS TABLE (segment_id int, dropped boolean, kept_events bigint, held_by text)
LANGUAGE plpgsql AS $$
DECLARE
    -- create_group and rewind take this lock too: nobody can be placed on what is about to be dropped.
    v_topic   custody.topics := custody.lock_topic(p_topic);
    v_segment custody.segments;
    v_holder  record;
BEGIN
    PERFORM custody.forget_kept(v_topic.topic_id);
    PERFORM custody.lock_cursors_and_heads(v_topic.topic_id);
    FOR v_segment IN
        SELECT * FROM custody.segments s
        WHERE s.topic_id = v_topic.topic_id AND s.sealed_at < p_before AND s.dropped_at IS NULL ORDER BY s.segment_id
    LOOP
        segment_id := v_segment.segment_id;
        kept_events := 0;
        SELECT * INTO v_holder FROM custody.segment_holder(v_segment, false);
        dropped := v_holder.held_group IS NULL;
        IF NOT dropped THEN
            held_by := format('group %s, partition %s, offset %s', v_holder.held_group, v_holder.held_partition,
                              v_holder.held_offset);
            RETURN NEXT;
            RETURN;
        END IF;
        kept_events := custody.remove_segment(v_segment, p_now);
        RETURN NEXT;
    END LOOP;
END $$;
