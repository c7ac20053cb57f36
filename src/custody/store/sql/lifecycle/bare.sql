-- Bare groups have a cursor and nothing else. Messages are done when the position behind them is committed.

CREATE FUNCTION custody.position(p_group_id int, p_partition int) RETURNS custody.frontiers
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_at custody.frontiers;
BEGIN
    SELECT f.* INTO v_at FROM custody.frontiers f
    WHERE f.group_id = p_group_id AND f.partition = p_partition ORDER BY f.claim_no DESC LIMIT 1;
    RETURN v_at;
END $$;

CREATE FUNCTION custody.require_bare(p_topic text, p_group custody.groups) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT (p_group).bare THEN
        PERFORM custody.refuse('lifecycle_group',
            format('group %L of topic %L has a lifecycle', (p_group).name, p_topic),
            'Claim and settle its messages, or rewind it.');
    END IF;
END $$;

CREATE FUNCTION custody.positions(p_topic text, p_group text, p_now timestamptz DEFAULT NULL)
RETURNS TABLE (partition int, next_offset bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_group custody.groups := custody.group_named(p_topic, p_group);
BEGIN
    PERFORM custody.require_bare(p_topic, v_group);
    -- Whoever asks for the positions reads on from there.
    PERFORM custody.deliver_due(h, coalesce(p_now, clock_timestamp()))
    FROM (SELECT x FROM custody.heads x WHERE x.topic_id = v_group.topic_id AND x.delayed_from IS NOT NULL
          ORDER BY x.partition) y (h);
    PERFORM custody.take_outbox(h, coalesce(p_now, clock_timestamp())) FROM custody.heads h
    WHERE h.topic_id = v_group.topic_id
      AND EXISTS (SELECT FROM custody.outbox o
                  WHERE o.topic_id = h.topic_id AND o.partition = h.partition AND o.ended_at IS NULL
                  AND o.available_at <= coalesce(p_now, now()));
    RETURN QUERY
    SELECT c.partition, (custody.position(c.group_id, c.partition)).frontier
    FROM custody.cursors c WHERE c.group_id = v_group.group_id ORDER BY c.partition;
END $$;

CREATE FUNCTION custody.commit_position(
    p_topic text, p_group text, p_partition int, p_offset bigint, p_worker text DEFAULT NULL,
    p_now timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_group    custody.groups := custody.group_named(p_topic, p_group);
    v_position custody.frontiers;
    v_head     custody.heads;
BEGIN
    PERFORM custody.require_read_committed();
    PERFORM custody.require_bare(p_topic, v_group);
    PERFORM 1 FROM custody.cursors WHERE group_id = v_group.group_id AND partition = p_partition FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM custody.require_partition(custody.topic_named(p_topic), p_partition);
    END IF;
    SELECT * INTO v_head FROM custody.heads WHERE topic_id = v_group.topic_id AND partition = p_partition;
    PERFORM custody.require_offset(p_topic, v_head, p_offset);
    v_position := custody.position(v_group.group_id, p_partition);
    INSERT INTO custody.frontiers
    VALUES (v_group.group_id, p_partition, v_position.claim_no + 1, p_offset, v_position.claim_no + 2);
    DELETE FROM custody.frontiers
    WHERE group_id = v_group.group_id AND partition = p_partition AND claim_no = v_position.claim_no;
    INSERT INTO custody.journal (at, kind, group_id, partition, offsets, worker)
    VALUES (coalesce(p_now, clock_timestamp()), 'commit', v_group.group_id, p_partition,
            int8multirange(int8range(least(v_position.frontier, p_offset), greatest(v_position.frontier, p_offset))),
            p_worker);
END $$;
