-- Growing a topic. Keys move to other partitions: their next messages could be handled before earlier ones.

-- Refused while a group that is ordered by key has unresolved messages, because the order of a key holds within its
-- partition.
CREATE FUNCTION custody.grow_topic(p_topic text, p_partitions int, p_now timestamptz DEFAULT NULL)
RETURNS custody.topics
LANGUAGE plpgsql AS $$
DECLARE
    v_topic custody.topics := custody.lock_topic(p_topic);
    v_now   timestamptz;
    v_open  record;
BEGIN
    IF p_partitions IS NULL OR p_partitions NOT BETWEEN 1 AND 4096 THEN
        PERFORM custody.refuse('invalid_argument',
            format('a topic cannot have %s partitions', coalesce(p_partitions::text, 'NULL')),
            'Give a number from 1 to 4096.');
    ELSIF v_topic.starvation_limit IS NOT NULL THEN
        PERFORM custody.refuse('conflict', format('topic %L has priorities, and cannot grow', p_topic),
            'Make another topic with as many partitions as you want, and let a pipeline copy the messages.');
    ELSIF p_partitions < v_topic.partitions THEN
        PERFORM custody.refuse('conflict',
            format('topic %L has %s partitions, and cannot have fewer', p_topic, v_topic.partitions),
            'Make another topic with as many as you want, and let a pipeline copy the messages.');
    ELSIF p_partitions = v_topic.partitions THEN
        RETURN v_topic;
    END IF;
    PERFORM custody.lock_cursors_and_heads(v_topic.topic_id);
    v_now := coalesce(p_now, clock_timestamp());
    SELECT g.name, sum(t.next_offset - f.frontier + custody.cardinality(custody.unresolved(f, true))) AS messages
    INTO v_open
    FROM custody.groups g JOIN custody.heads h USING (topic_id)
    CROSS JOIN LATERAL custody.tail(h) t
    CROSS JOIN LATERAL custody.position(g.group_id, h.partition) f
    WHERE g.topic_id = v_topic.topic_id AND g.ordering = 'key' AND NOT g.bare
    GROUP BY g.group_id, g.name
    HAVING sum(t.next_offset - f.frontier + custody.cardinality(custody.unresolved(f, true))) > 0
    ORDER BY g.name LIMIT 1;
    IF FOUND THEN
        PERFORM custody.refuse('conflict',
            format('group %L of topic %L is ordered by key and has %s unresolved messages: '
                   'keys would move away from them', v_open.name, p_topic, v_open.messages),
            'Stop publishing until it has resolved them all, and grow then; or make another topic.');
    END IF;
    UPDATE custody.topics t SET partitions = p_partitions WHERE t.topic_id = v_topic.topic_id;
    -- Publishers that wait for a head see there that their keys may belong to other partitions now.
    UPDATE custody.heads h SET partitions = p_partitions, grown_at = (custody.tail(h)).next_offset
    WHERE h.topic_id = v_topic.topic_id;
    INSERT INTO custody.heads (topic_id, partition, segment_id, partitions)
    SELECT v_topic.topic_id, n, s.segment_id, p_partitions
    FROM custody.segments s, generate_series(v_topic.partitions, p_partitions - 1) n
    WHERE s.topic_id = v_topic.topic_id AND s.sealed_at IS NULL;
    INSERT INTO custody.segment_bounds (segment_id, partition, first_offset)
    SELECT h.segment_id, h.partition, 0 FROM custody.heads h
    WHERE h.topic_id = v_topic.topic_id AND h.partition >= v_topic.partitions;
    -- Delayed messages move with their keys. A message whose partition was named stays.
    UPDATE custody.delayed d SET partition = custody.partition_for(d.key, p_partitions)
    WHERE d.topic_id = v_topic.topic_id AND d.partition = custody.partition_for(d.key, v_topic.partitions);
    UPDATE custody.heads h SET delayed_from = least(h.delayed_from, w.earliest)
    FROM (SELECT d.partition, min(d.deliver_at) AS earliest FROM custody.delayed d WHERE d.topic_id = v_topic.topic_id
          GROUP BY d.partition) w
    WHERE h.topic_id = v_topic.topic_id AND h.partition = w.partition;
    -- The cursor comes last: a claim that finds a cursor finds the rest.
    INSERT INTO custody.frontiers
    SELECT g.group_id, n, 0, 0, 1 FROM custody.groups g, generate_series(v_topic.partitions, p_partitions - 1) n
    WHERE g.topic_id = v_topic.topic_id;
    INSERT INTO custody.journal (at, kind, group_id, partition, offsets)
    SELECT v_now, 'start', g.group_id, n, '{}'
    FROM custody.groups g, generate_series(v_topic.partitions, p_partitions - 1) n
    WHERE g.topic_id = v_topic.topic_id;
    INSERT INTO custody.cursors (group_id, partition, binding_no)
    SELECT g.group_id, n, g.binding_no FROM custody.groups g, generate_series(v_topic.partitions, p_partitions - 1) n
    WHERE g.topic_id = v_topic.topic_id;
    RETURN custody.topic_named(p_topic);
END $$;

-- Whether the key of a message moved to another partition when the topic grew. Newer messages of the key are there.
CREATE FUNCTION custody.key_moved(p_head custody.heads, p_offset bigint, p_key text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_key IS NOT NULL AND p_offset < (p_head).grown_at
        AND custody.partition_for(p_key, (p_head).partitions) <> (p_head).partition
$$;

-- An ordered group does not go back to messages whose keys have moved. A claim looks for a key in its own partition
-- only, and could hand out an old message beside a newer one.
CREATE FUNCTION custody.require_unmoved(p_topic text, p_group custody.groups, p_dead custody.cases[]) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_moved record;
BEGIN
    IF (p_group).ordering <> 'key' THEN
        RETURN;
    END IF;
    SELECT count(*) AS messages, (array_agg(format('%s/%s/%s', p_topic, d.partition, d."offset")))[1] AS first
    INTO v_moved
    FROM unnest(p_dead) d JOIN custody.heads h ON h.topic_id = (p_group).topic_id AND h.partition = d.partition
    WHERE custody.key_moved(h, d."offset", d.key);
    IF v_moved.messages > 0 THEN
        PERFORM custody.refuse('keys_moved',
            format('the keys of %s of these dead messages have moved to other partitions since the topic has grown, '
                   'the first is %s',
                   v_moved.messages, v_moved.first),
            'Publish each again (a replay does it with a copy in a dead-letter topic) and discard it here; '
            'name the others by partition and offsets to redrive them.');
    END IF;
END $$;

-- The same for a range of a partition. It is read in steps, up to the first such message.
CREATE FUNCTION custody.require_unmoved_from(
    p_topic text, p_group custody.groups, p_head custody.heads, p_from bigint, p_until bigint
)
RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    c_step  constant int := 10000;
    v_until constant bigint := least(p_until, (p_head).grown_at);
    v_moved bigint;
BEGIN
    WHILE (p_group).ordering = 'key' AND p_from < v_until LOOP
        SELECT min(k."offset") INTO v_moved
        FROM custody.keys_of(p_head, int8multirange(int8range(p_from, least(p_from + c_step, v_until)))) k
        WHERE custody.key_moved(p_head, k."offset", k.key);
        IF v_moved IS NOT NULL THEN
            PERFORM custody.refuse('keys_moved',
                format('%s/%s cannot be rewound to before offset %s: the topic has grown since, '
                       'and the key of message %s has moved to another partition',
                       p_topic, (p_head).partition, v_until, v_moved),
                format('Rewind to offset %s or later. A new group may read from the start; '
                       'it gets such keys from two partitions at once.', v_until));
        END IF;
        p_from := p_from + c_step;
    END LOOP;
END $$;
