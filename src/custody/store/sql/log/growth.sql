-- A topic gets more partitions. Keys move by that: their next messages go elsewhere, and could be handled before earlier ones.

-- Refused while a group that is ordered by key has anything unresolved, for the order of a key is kept within its partition.
CREATE FUNCTION custody.grow_topic(p_topic text, p_partitions int, p_now timestamptz DEFAULT NULL) RETURNS custody.topics
LANGUAGE plpgsql AS $$
DECLARE
    v_topic custody.topics := custody.lock_topic(p_topic);
    v_now   timestamptz;
    v_open  record;
BEGIN
    IF p_partitions IS NULL OR p_partitions NOT BETWEEN 1 AND 4096 THEN
        PERFORM custody.refuse('invalid_argument', format('a topic cannot have %s partitions', coalesce(p_partitions::text, 'NULL')),
            'Give a number from 1 to 4096.');
    ELSIF v_topic.starvation_limit IS NOT NULL THEN
        PERFORM custody.refuse('conflict', format('topic %L has priorities, and cannot grow', p_topic),
            'Make another topic with as many partitions as you want, and let a pipeline copy the messages.');
    ELSIF p_partitions < v_topic.partitions THEN
        PERFORM custody.refuse('conflict', format('topic %L has %s partitions, and cannot have fewer', p_topic, v_topic.partitions),
            'Make another topic with as many as you want, and let a pipeline copy the messages.');
    ELSIF p_partitions = v_topic.partitions THEN
        RETURN v_topic;
    END IF;
    PERFORM custody.lock_cursors_and_heads(v_topic.topic_id);
    v_now := coalesce(p_now, clock_timestamp());
    SELECT g.name, sum(t.next_offset - f.frontier + custody.cardinality(custody.unresolved(f, true))) AS messages INTO v_open
    FROM custody.groups g JOIN custody.heads h USING (topic_id)
    CROSS JOIN LATERAL custody.tail(h) t
    CROSS JOIN LATERAL custody.position(g.group_id, h.partition) f
    WHERE g.topic_id = v_topic.topic_id AND g.ordering = 'key' AND NOT g.bare
    GROUP BY g.group_id, g.name
    HAVING sum(t.next_offset - f.frontier + custody.cardinality(custody.unresolved(f, true))) > 0
    ORDER BY g.name LIMIT 1;
    IF FOUND THEN
        PERFORM custody.refuse('conflict',
            format('group %L of topic %L is ordered by key and has %s unresolved messages: keys would move away from them', v_open.name, p_topic,
                   v_open.messages),
            'Stop publishing until it has resolved them all, and grow then; or make another topic.');
    END IF;
    UPDATE custody.topics t SET partitions = p_partitions WHERE t.topic_id = v_topic.topic_id;
    -- publishers that wait for a head see in it that their keys may belong elsewhere now
    UPDATE custody.heads h SET partitions = p_partitions WHERE h.topic_id = v_topic.topic_id;
    INSERT INTO custody.heads (topic_id, partition, segment_id, partitions)
    SELECT v_topic.topic_id, n, s.segment_id, p_partitions
    FROM custody.segments s, generate_series(v_topic.partitions, p_partitions - 1) n
    WHERE s.topic_id = v_topic.topic_id AND s.sealed_at IS NULL;
    INSERT INTO custody.segment_bounds (segment_id, partition, first_offset)
    SELECT h.segment_id, h.partition, 0 FROM custody.heads h WHERE h.topic_id = v_topic.topic_id AND h.partition >= v_topic.partitions;
    -- delayed messages move with their keys; one whose partition was named stays
    UPDATE custody.delayed d SET partition = custody.partition_for(d.key, p_partitions)
    WHERE d.topic_id = v_topic.topic_id AND d.partition = custody.partition_for(d.key, v_topic.partitions);
    UPDATE custody.heads h SET delayed_from = least(h.delayed_from, w.earliest)
    FROM (SELECT d.partition, min(d.deliver_at) AS earliest FROM custody.delayed d WHERE d.topic_id = v_topic.topic_id GROUP BY d.partition) w
    WHERE h.topic_id = v_topic.topic_id AND h.partition = w.partition;
    -- in this order: a claim that finds a cursor finds the rest
    INSERT INTO custody.frontiers
    SELECT g.group_id, n, 0, 0, 1 FROM custody.groups g, generate_series(v_topic.partitions, p_partitions - 1) n WHERE g.topic_id = v_topic.topic_id;
    INSERT INTO custody.journal (at, kind, group_id, partition, offsets)
    SELECT v_now, 'start', g.group_id, n, '{}' FROM custody.groups g, generate_series(v_topic.partitions, p_partitions - 1) n
    WHERE g.topic_id = v_topic.topic_id;
    INSERT INTO custody.cursors (group_id, partition, binding_no)
    SELECT g.group_id, n, g.binding_no FROM custody.groups g, generate_series(v_topic.partitions, p_partitions - 1) n WHERE g.topic_id = v_topic.topic_id;
    RETURN custody.topic_named(p_topic);
END $$;
