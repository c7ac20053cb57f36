-- Figures of a group, computed from its exceptions.

-- The offsets below the frontier that are not resolved; parked ones only if asked for.
CREATE FUNCTION custody.unresolved(p_at custody.frontiers, p_with_parked boolean) RETURNS int8multirange
LANGUAGE sql STABLE AS $$
    SELECT coalesce(range_agg(x.s), '{}') FROM (
        SELECT l.held AS s FROM custody.leases l
        WHERE l.group_id = (p_at).group_id AND l.partition = (p_at).partition AND l.claim_no >= (p_at).oldest_claim
        UNION ALL
        SELECT r.ranges FROM custody.returned r WHERE r.group_id = (p_at).group_id AND r.partition = (p_at).partition
        UNION ALL
        SELECT int8multirange(range_agg(int8range(c."offset", c."offset" + 1))) FROM custody.cases c
        WHERE c.group_id = (p_at).group_id AND c.partition = (p_at).partition
          AND (c.state = 'waiting' OR c.state = 'dead' AND c.held OR c.state = 'parked' AND p_with_parked)
        UNION ALL
        SELECT p.ranges FROM custody.parked p
        WHERE p_with_parked AND p.group_id = (p_at).group_id AND p.partition = (p_at).partition
    ) x
$$;

-- Gaps among the resolved offsets, except those in which all is parked. A range that reaches the frontier has nothing
-- resolved above it, so it is no gap.
CREATE FUNCTION custody.ack_holes(p_at custody.frontiers, p_taken int8multirange DEFAULT '{}') RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT count(*)
    FROM (SELECT custody.unresolved(p_at, false) + p_taken AS counted,
                 custody.unresolved(p_at, true) + p_taken AS whole OFFSET 0) u,
         unnest(u.whole) r
    WHERE upper(r) < (p_at).frontier AND r && u.counted
$$;

-- For a bound group lag and depth count messages that it has not matched yet, bound to it or not: matching all of them
-- would cost as much as claiming them.
CREATE FUNCTION custody.partition_stats(p_topic text, p_group text, p_now timestamptz DEFAULT NULL)
RETURNS TABLE (
    partition int, first_offset bigint, tail bigint, frontier bigint, lag bigint, waiting bigint, in_flight bigint,
    holes bigint, parked bigint, dead bigint, depth bigint, oldest_unresolved bigint, oldest_unresolved_at timestamptz,
    priority text
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
    v_group custody.groups := custody.group_named(p_topic, p_group);
BEGIN
    RETURN QUERY
    SELECT h.partition, h.first_offset, t.next_offset, f.frontier, t.next_offset - f.frontier,
           c.waiting + r.messages + l.expired, l.live, custody.ack_holes(f), c.parked + p.messages, c.dead,
           t.next_offset - f.frontier + l.live + l.expired + r.messages + c.waiting + c.parked + c.held + p.messages,
           u.lowest, (SELECT e.published_at
                      FROM custody.events_in(h, int8multirange(int8range(u.lowest, u.lowest + 1))) e),
           CASE WHEN o.starvation_limit IS NOT NULL THEN custody.lane(h.partition) END
    FROM custody.heads h
    JOIN custody.topics o USING (topic_id)
    CROSS JOIN LATERAL custody.tail(h) t
    CROSS JOIN LATERAL custody.position(v_group.group_id, h.partition) f
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(x.remaining) FILTER (WHERE x.deadline > v_now), 0)::bigint AS live,
               coalesce(sum(x.remaining) FILTER (WHERE x.deadline <= v_now), 0)::bigint AS expired
        FROM custody.leases x
        WHERE x.group_id = v_group.group_id AND x.partition = h.partition AND x.claim_no >= f.oldest_claim) l
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(custody.cardinality(x.ranges)), 0)::bigint AS messages
        FROM custody.returned x WHERE x.group_id = v_group.group_id AND x.partition = h.partition) r
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE x.state = 'waiting') AS waiting,
               count(*) FILTER (WHERE x.state = 'parked') AS parked, count(*) FILTER (WHERE x.state = 'dead') AS dead,
               count(*) FILTER (WHERE x.held) AS held
        FROM custody.cases x WHERE x.group_id = v_group.group_id AND x.partition = h.partition) c
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(x.messages), 0)::bigint AS messages
        FROM custody.parked x WHERE x.group_id = v_group.group_id AND x.partition = h.partition) p
    CROSS JOIN LATERAL (
        SELECT coalesce(lower(custody.unresolved(f, true)),
                        CASE WHEN f.frontier < t.next_offset THEN f.frontier END) AS lowest) u
    WHERE h.topic_id = v_group.topic_id
    ORDER BY h.partition;
END $$;

-- Refuses a publish that would make a partition deeper than the topic allows. The depth is what the slowest group has
-- not resolved; without groups it is what the log holds.
CREATE FUNCTION custody.require_room(p_topic custody.topics, p_head custody.heads, p_next bigint, p_count int)
RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_depth bigint;
BEGIN
    SELECT max(p_next - f.frontier + custody.cardinality(custody.unresolved(f, true))) INTO v_depth
    FROM custody.groups g CROSS JOIN LATERAL custody.position(g.group_id, (p_head).partition) f
    WHERE g.topic_id = (p_topic).topic_id;
    v_depth := coalesce(v_depth, p_next - (p_head).first_offset);
    IF v_depth + p_count > (p_topic).max_depth THEN
        PERFORM custody.refuse('queue_full',
            format('%s/%s has %s unresolved messages; %s more would pass its max_depth of %s', (p_topic).name,
                   (p_head).partition, v_depth, p_count, (p_topic).max_depth),
            'Wait until consumers have caught up, publish less at a time, or raise max_depth.');
    END IF;
END $$;

-- Seconds until something of the group is due by itself: a waiting case, or a lease that expires. Null if nothing is,
-- or while the group is paused. While the breaker is open only the next probe counts. With p_partition only of that
-- one.
CREATE FUNCTION custody.next_due(
    p_topic text, p_group text, p_now timestamptz DEFAULT NULL, p_partition int DEFAULT NULL
)
RETURNS double precision
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_group custody.groups := custody.group_named(p_topic, p_group);
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
BEGIN
    IF v_group.paused_at IS NOT NULL THEN
        RETURN NULL;
    ELSIF v_group.probe_at > v_now THEN
        RETURN extract(epoch FROM v_group.probe_at - v_now);
    END IF;
    RETURN (
        SELECT extract(epoch FROM min(least(
            w.run_at, l.deadline, CASE WHEN h.delayed_from IS NOT NULL THEN custody.next_delivery(h) END)) - v_now)
        FROM custody.cursors c
        JOIN custody.heads h ON h.topic_id = v_group.topic_id AND h.partition = c.partition
        CROSS JOIN LATERAL custody.position(c.group_id, c.partition) f
        CROSS JOIN LATERAL (
            SELECT min(x.run_at) AS run_at FROM custody.cases x
            WHERE x.group_id = c.group_id AND x.partition = c.partition AND x.state = 'waiting') w
        CROSS JOIN LATERAL (
            SELECT min(x.deadline) AS deadline FROM custody.leases x
            WHERE x.group_id = c.group_id AND x.partition = c.partition AND x.claim_no >= f.oldest_claim) l
        WHERE c.group_id = v_group.group_id AND (p_partition IS NULL OR c.partition = p_partition));
END $$;
