-- Priorities. Each partition of such a topic is five in the log, a lane for each priority: partition p of the log is
-- lane p % 5 of partition p / 5. Otherwise a lane is a partition like any other, so a key keeps its order within a
-- lane.

CREATE FUNCTION custody.lanes() RETURNS text[]
LANGUAGE sql IMMUTABLE AS $$ SELECT ARRAY['critical', 'high', 'normal', 'low', 'background'] $$;

CREATE FUNCTION custody.lane(p_partition int) RETURNS text
LANGUAGE sql IMMUTABLE AS $$ SELECT (custody.lanes())[p_partition % 5 + 1] $$;

-- The partition of a message: by its key, or random. On a topic with priorities it is the lane of the message's
-- priority (normal, if it has none).
CREATE FUNCTION custody.place(p_topic custody.topics, p_key text, p_priority text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    v_lanes int := CASE WHEN (p_topic).starvation_limit IS NULL THEN 1 ELSE 5 END;
    v_lane  int := array_position(custody.lanes(), coalesce(p_priority, 'normal')) - 1;
    v_among int := (p_topic).partitions / v_lanes;
BEGIN
    IF v_lane IS NULL THEN
        PERFORM custody.refuse('invalid_argument', format('%L is not a priority', p_priority),
            format('It is one of: %s.', array_to_string(custody.lanes(), ', ')));
    ELSIF v_lanes = 1 AND coalesce(p_priority, 'normal') <> 'normal' THEN
        PERFORM custody.refuse('no_priorities', format('topic %L has no priorities', (p_topic).name),
            'Leave the priority out, or publish to a topic that was created with priorities.');
    END IF;
    RETURN coalesce(custody.partition_for(p_key, v_among), floor(random() * v_among)::int) * v_lanes
           + CASE WHEN v_lanes = 1 THEN 0 ELSE v_lane END;
END $$;

-- Since when the message that has waited longest in a partition could be handed out; null if there is none. A fresh or
-- parked message waits since it was published, a retry since it was due, and one that came back since then.
CREATE FUNCTION custody.waiting_since(p_group custody.groups, p_head custody.heads, p_now timestamptz)
RETURNS timestamptz
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_at    custody.frontiers := custody.position((p_group).group_id, (p_head).partition);
    v_since timestamptz;
    v_held  int8multirange;
    v_keys  text[];
    v_first bigint;
BEGIN
    SELECT least(
        (SELECT e.published_at
         FROM custody.events_in(p_head, int8multirange(int8range(v_at.frontier, v_at.frontier + 1))) e),
        (SELECT CASE WHEN d.at <= p_now THEN d.at END FROM (SELECT custody.next_delivery(p_head) AS at) d),
        (SELECT o.available_at FROM custody.outbox o
         WHERE o.topic_id = (p_head).topic_id AND o.partition = (p_head).partition AND o.ended_at IS NULL
           AND o.available_at <= p_now
         ORDER BY o.id LIMIT 1),
        (SELECT min(returned_at) FROM custody.returned WHERE group_id = v_at.group_id AND partition = v_at.partition),
        (SELECT CASE WHEN min(run_at) <= p_now THEN min(run_at) END FROM custody.cases
         WHERE group_id = v_at.group_id AND partition = v_at.partition AND state = 'waiting'),
        (SELECT min(deadline) FROM custody.leases
         WHERE group_id = v_at.group_id AND partition = v_at.partition AND claim_no >= v_at.oldest_claim
           AND deadline <= p_now))
    INTO v_since;
    IF (p_group).ordering <> 'key' THEN
        RETURN v_since;
    END IF;
    SELECT array_agg(k.key) INTO v_keys FROM (
        (SELECT f.key FROM custody.freed f WHERE f.group_id = v_at.group_id AND f.partition = v_at.partition LIMIT 1000)
        UNION
        (SELECT a.key FROM custody.awaited a
         WHERE a.group_id = v_at.group_id AND a.partition = v_at.partition LIMIT 1000)) k;
    IF v_keys IS NULL THEN
        RETURN v_since;
    END IF;
    SELECT range_agg(held) INTO v_held FROM custody.leases
    WHERE group_id = v_at.group_id AND partition = v_at.partition AND claim_no >= v_at.oldest_claim
      AND deadline > p_now;
    IF v_held IS NOT NULL THEN
        SELECT array_agg(x.k) INTO v_keys
        FROM (SELECT unnest(v_keys) AS k EXCEPT SELECT unnest((custody.keys_in_flight(p_head, v_held, v_keys)).keys)) x;
    END IF;
    SELECT min(h.lowest) INTO v_first FROM custody.open_heads(v_at.group_id, v_at.partition, v_keys) h
    WHERE h.parked_offset = h.lowest OR h.case_state = 'parked';
    IF v_first IS NOT NULL THEN
        v_since := least(v_since,
                         (SELECT e.published_at
                          FROM custody.events_in(p_head, int8multirange(int8range(v_first, v_first + 1))) e));
    END IF;
    RETURN v_since;
END $$;

-- The candidates of a claim on a topic with priorities, each with its part of the weight of its lane. Messages that
-- have waited longer than the limit come first. `rank` is drawn: a lane of twice the weight comes first twice as often.
CREATE FUNCTION custody.weighed_candidates(p_group custody.groups, p_limit interval, p_now timestamptz)
RETURNS TABLE (partition int, weight double precision, starving boolean, since timestamptz, rank double precision)
LANGUAGE sql VOLATILE AS $$
    SELECT c.partition, l.weight / count(*) OVER (PARTITION BY l.lane, c.starving), c.starving, c.since, l.rank
    FROM (
        SELECT p AS partition, w.since, coalesce(w.since <= p_now - p_limit, false) AS starving
        FROM unnest(custody.claim_candidates(p_group, p_now)) p
        JOIN custody.heads h ON h.topic_id = (p_group).topic_id AND h.partition = p
        CROSS JOIN LATERAL (SELECT custody.waiting_since(p_group, h, p_now) AS since OFFSET 0) w) c
    JOIN (
        SELECT (w.lane - 1)::int AS lane, w.weight, -ln(1 - random()) / w.weight AS rank
        FROM unnest(ARRAY[50, 25, 15, 7, 3]::double precision[])
             WITH ORDINALITY w (weight, lane)) l ON l.lane = c.partition % 5
$$;

-- The order in which a claim tries the candidates. Partitions that have nothing for certain come last.
CREATE FUNCTION custody.candidates_by_priority(p_group custody.groups, p_limit interval, p_now timestamptz)
RETURNS int[]
LANGUAGE sql VOLATILE AS $$
    SELECT array_agg(c.partition ORDER BY c.starving DESC, c.since IS NULL, c.rank,
                     CASE WHEN c.starving THEN c.since END, random())
    FROM custody.weighed_candidates(p_group, p_limit, p_now) c
$$;

-- The order in which a pipeline takes from the candidates, and the part of the rest that each may take. Those with
-- little to give for their weight come first, so that the others get what they leave.
CREATE FUNCTION custody.shares_by_priority(
    p_group custody.groups, p_limit interval, p_now timestamptz, OUT candidates int[], OUT shares double precision[]
)
LANGUAGE sql VOLATILE AS $$
    SELECT array_agg(s.partition ORDER BY s.starving DESC, s.turn), array_agg(s.share ORDER BY s.starving DESC, s.turn)
    FROM (
        SELECT x.partition, x.starving, row_number() OVER w AS turn,
               x.weight / sum(x.weight) OVER (PARTITION BY x.starving ORDER BY x.fresh / x.weight, x.partition
                                              ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS share
        FROM (SELECT c.*, (custody.tail(h)).next_offset
              - (custody.position((p_group).group_id, c.partition)).frontier AS fresh
              FROM custody.weighed_candidates(p_group, p_limit, p_now) c
              JOIN custody.heads h ON h.topic_id = (p_group).topic_id AND h.partition = c.partition) x
        WINDOW w AS (PARTITION BY x.starving ORDER BY x.fresh / x.weight, x.partition)) s
$$;

-- What a caller has to know of a topic to place messages in it.
CREATE FUNCTION custody.layout(p_topic text) RETURNS TABLE (topic_id int, partitions int, priorities boolean)
LANGUAGE sql STABLE AS $$
    SELECT t.topic_id, t.partitions, t.starvation_limit IS NOT NULL FROM custody.topic_named(p_topic) t
$$;
