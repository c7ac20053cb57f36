-- Replay: a copy in a dead-letter topic is published again, once, as the original message.

-- p_target: a topic other than the original one. Every group of the target gets the message; to give it only to the
-- group in which it died, redrive it there. The dead message is done by this. `resolved` says whether it was still
-- dead, or somebody has redriven or discarded it before. A repeat publishes nothing and returns what the first replay
-- did. p_origin: replay only if the copy names this topic as its own (see dead_letter_origin).
CREATE FUNCTION custody.replay_dead_letter(
    p_dlq_topic text, p_partition int, p_offset bigint, p_target text DEFAULT NULL, p_actor text DEFAULT NULL,
    p_reason text DEFAULT NULL, p_now timestamptz DEFAULT NULL, p_origin text DEFAULT NULL
) RETURNS TABLE (topic text, partition int, "offset" bigint, duplicate boolean, resolved boolean)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_dlq    custody.topics := custody.topic_named(p_dlq_topic);
    v_name   text := format('%s/%s/%s', p_dlq_topic, p_partition, p_offset);
    v_copy   custody.event;
    v_target custody.topics;
    v_from   record;
BEGIN
    PERFORM custody.require_read_committed();
    PERFORM custody.require_partition(v_dlq, p_partition);
    -- A second replay of the same copy waits here for the first one.
    PERFORM pg_advisory_xact_lock(hashtext('custody.replays'),
                                  hashtext(format('%s/%s/%s', v_dlq.topic_id, p_partition, p_offset)));
    SELECT r.target, r.target_partition, r.target_offset, true, r.resolved
    INTO topic, partition, "offset", duplicate, resolved
    FROM custody.replays r WHERE r.topic_id = v_dlq.topic_id AND r.partition = p_partition AND r."offset" = p_offset;
    IF FOUND THEN
        RETURN NEXT;
        RETURN;
    END IF;

    v_copy := custody.dead_letter_at(v_dlq, p_partition, p_offset);
    v_from := custody.original_of(v_copy.headers);
    IF v_from.topic <> p_origin THEN
        PERFORM custody.refuse('busy', format('%s has become another message meanwhile', v_name),
            'Look at it, and try again.');
    END IF;
    v_target := custody.topic_named(coalesce(p_target, v_from.topic));
    topic := v_target.name;
    duplicate := false;

    resolved := custody.resolve_replayed(v_dlq, v_from.topic, v_from.partition, v_from."offset", v_from.consumer_group,
                                         v_copy);
    SELECT r.partition, r."offset" INTO partition, "offset"
    FROM custody.publish(
        topic, ARRAY[CASE WHEN v_copy.key IS NULL THEN v_from.partition % v_target.partitions
                          ELSE custody.place(v_target, v_copy.key,
                                             CASE WHEN v_target.starvation_limit IS NOT NULL
                                                  AND v_target.name = v_from.topic
                                                                        THEN custody.lane(v_from.partition) END) END],
        ARRAY[v_copy.key], ARRAY[v_copy.kind::text], ARRAY[v_copy.payload],
        ARRAY[(v_copy.headers - custody.death_headers()
               || jsonb_build_object('x-custody-replayed-from', v_name))::text],
        p_now => p_now, p_of => v_target.partitions) r;
    IF resolved THEN
        INSERT INTO custody.journal (at, kind, group_id, partition, offsets, worker, error, detail)
        SELECT coalesce(p_now, clock_timestamp()), 'replay', g.group_id, v_from.partition,
               int8multirange(int8range(v_from."offset", v_from."offset" + 1)), p_actor, p_reason,
               jsonb_build_object('dead_letter', v_name, 'replayed_as', format('%s/%s/%s', topic, partition, "offset"))
        FROM custody.group_named(v_from.topic, v_from.consumer_group) g;
    END IF;
    -- After the head is locked, as in delete_topic.
    INSERT INTO custody.replays
    VALUES (v_dlq.topic_id, p_partition, p_offset, topic, partition, "offset", resolved, p_actor, p_reason,
            coalesce(p_now, clock_timestamp()));
    RETURN NEXT;
END $$;

-- The copy at an offset of a dead-letter topic. Anything else there is refused.
CREATE FUNCTION custody.dead_letter_at(p_dlq custody.topics, p_partition int, p_offset bigint) RETURNS custody.event
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_name text := format('%s/%s/%s', (p_dlq).name, p_partition, p_offset);
    v_head custody.heads;
    v_copy custody.event;
BEGIN
    SELECT h.* INTO v_head FROM custody.heads h WHERE h.topic_id = (p_dlq).topic_id AND h.partition = p_partition;
    SELECT * INTO v_copy FROM custody.events_in(v_head, int8multirange(int8range(p_offset, p_offset + 1)));
    IF NOT FOUND THEN
        PERFORM custody.refuse('offset_out_of_range',
            format('%s has no message: the partition goes from %s to %s', v_name, v_head.first_offset,
                   (custody.tail(v_head)).next_offset),
            'Look into the dead-letter topic for the right offset.');
    ELSIF (custody.original_of(v_copy.headers)).partition IS NULL THEN
        PERFORM custody.refuse('invalid_argument',
            format('%s is not a dead letter: it does not say where it came from', v_name),
            'Name a message that a group with dead_letter = topic has put there.');
    END IF;
    RETURN v_copy;
END $$;

-- The topic that a copy names as its own, for callers that have to know it before a replay. If the copy was replayed,
-- it may be gone: then only the target is known.
CREATE FUNCTION custody.dead_letter_origin(
    p_dlq_topic text, p_partition int, p_offset bigint, OUT origin text, OUT replayed_to text
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_dlq custody.topics := custody.topic_named(p_dlq_topic);
BEGIN
    PERFORM custody.require_partition(v_dlq, p_partition);
    SELECT r.target INTO replayed_to FROM custody.replays r
    WHERE r.topic_id = v_dlq.topic_id AND r.partition = p_partition AND r."offset" = p_offset;
    IF replayed_to IS NULL THEN
        origin := (custody.original_of((custody.dead_letter_at(v_dlq, p_partition, p_offset)).headers)).topic;
    ELSE
        SELECT (custody.original_of(e.headers)).topic INTO origin
        FROM custody.heads h, custody.events_in(h, int8multirange(int8range(p_offset, p_offset + 1))) e
        WHERE h.topic_id = v_dlq.topic_id AND h.partition = p_partition;
    END IF;
END $$;

-- The headers that a copy has and the original message had not.
CREATE FUNCTION custody.death_headers() RETURNS text[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY['x-custody-dlq-reason', 'x-custody-original-topic', 'x-custody-original-partition',
                 'x-custody-original-offset', 'x-custody-consumer-group', 'x-custody-delivery-attempts',
                 'x-custody-first-failure', 'x-custody-last-failure',
                 'x-custody-failure-errors']
$$;

-- The origin of a copy by its headers. Anybody may have written them: all is null if they are not well-formed.
CREATE FUNCTION custody.original_of(
    p_headers jsonb, OUT topic text, OUT partition int, OUT "offset" bigint, OUT consumer_group text
)
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN h.says THEN h.topic END, CASE WHEN h.says THEN h.partition::int END,
           CASE WHEN h.says THEN h."offset"::bigint END, CASE WHEN h.says THEN h.consumer_group END
    FROM (SELECT x.*, coalesce(x.topic IS NOT NULL AND x.partition ~ '^[0-9]{1,9}$' AND x."offset" ~ '^[0-9]{1,18}$',
                               false) AS says
          FROM (SELECT p_headers ->> 'x-custody-original-topic' AS topic,
                       p_headers ->> 'x-custody-original-partition' AS partition,
                       p_headers ->> 'x-custody-original-offset' AS "offset",
                       p_headers ->> 'x-custody-consumer-group' AS consumer_group) x) h
$$;

-- Closes the dead message of this copy as done. Returns false if it is not dead any more, or if it is another message:
-- the topic may have been made anew, and anybody can write headers.
CREATE FUNCTION custody.resolve_replayed(
    p_dlq custody.topics, p_topic text, p_partition int, p_offset bigint, p_group text, p_copy custody.event
) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_group custody.groups;
    v_head  custody.heads;
    v_case  custody.cases;
BEGIN
    SELECT g.* INTO v_group FROM custody.topics t JOIN custody.groups g USING (topic_id)
    WHERE t.name = p_topic AND t.name || '-dlq' = (p_dlq).name AND g.name = p_group;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- Claims depend on what is dead.
    PERFORM 1 FROM custody.cursors WHERE group_id = v_group.group_id AND partition = p_partition FOR UPDATE;
    SELECT * INTO v_case FROM custody.cases
    WHERE group_id = v_group.group_id AND partition = p_partition AND "offset" = p_offset AND state = 'dead';
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT * INTO v_head FROM custody.heads WHERE topic_id = v_group.topic_id AND partition = p_partition;
    PERFORM 1 FROM custody.events_in(v_head, int8multirange(int8range(p_offset, p_offset + 1))) e
    WHERE e.key IS NOT DISTINCT FROM (p_copy).key AND e.kind = (p_copy).kind AND e.payload = (p_copy).payload;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM custody.close_dead(v_group, ARRAY[v_case]);
    RETURN true;
END $$;
