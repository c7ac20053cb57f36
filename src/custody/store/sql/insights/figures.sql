-- Figures of all topics and groups at once, for monitoring. Their cost grows with the exceptions, and with a few index
-- lookups for each group and partition; the log is not scanned.

-- What a topic holds, and how many messages were ever appended to it.
CREATE FUNCTION custody.topic_figures() RETURNS TABLE (topic text, partitions int, messages bigint, appended bigint)
LANGUAGE sql STABLE SET enable_seqscan = off SET jit = off AS $$
    SELECT o.name, o.partitions, sum(t.next_offset - h.first_offset)::bigint, sum(t.next_offset)::bigint
    FROM custody.topics o JOIN custody.heads h USING (topic_id) CROSS JOIN LATERAL custody.tail(h) t
    GROUP BY o.topic_id ORDER BY o.name
$$;

-- The figures of custody.partition_stats for every group, over all its partitions. breaker is null without one. For a
-- bound group lag and depth count messages that it has not matched yet, bound to it or not.
CREATE FUNCTION custody.group_figures(p_now timestamptz DEFAULT NULL)
RETURNS TABLE (
    topic text, consumer_group text, lag bigint, waiting bigint, in_flight bigint, holes bigint, parked bigint,
    dead bigint, depth bigint, oldest_unresolved_age double precision, paused boolean, breaker text, bound boolean
)
LANGUAGE sql STABLE SET enable_seqscan = off SET jit = off AS $$
    WITH at AS MATERIALIZED (SELECT coalesce(p_now, clock_timestamp()) AS now),
    ends AS MATERIALIZED (      -- once for each partition, however many groups read it
        SELECT h.topic_id, h.partition, h AS head, t.next_offset FROM custody.heads h
        CROSS JOIN LATERAL custody.tail(h) t),
    cases AS MATERIALIZED (
        SELECT c.group_id, c.partition, count(*) FILTER (WHERE c.state = 'waiting') AS waiting,
               count(*) FILTER (WHERE c.state = 'parked') AS parked, count(*) FILTER (WHERE c.state = 'dead') AS dead,
               count(*) FILTER (WHERE c.held) AS held,
               coalesce(range_agg(int8range(c."offset", c."offset" + 1)) FILTER (WHERE c.state = 'waiting' OR c.held),
                        '{}') AS open,
               coalesce(range_agg(int8range(c."offset", c."offset" + 1)) FILTER (WHERE c.state = 'parked'),
                        '{}') AS behind
        FROM custody.cases c GROUP BY c.group_id, c.partition),
    places AS MATERIALIZED (
        SELECT g.group_id, e.head, f.frontier, e.next_offset - f.frontier AS lag, l.live,
               coalesce(c.waiting, 0) + r.messages + l.expired AS waiting, coalesce(c.parked, 0) + p.messages AS parked,
               coalesce(c.dead, 0) AS dead, coalesce(c.held, 0) AS held,
               coalesce(c.open, '{}') + l.held + r.ranges AS counted, coalesce(c.behind, '{}') + p.ranges AS behind
        FROM custody.groups g
        JOIN ends e USING (topic_id)
        CROSS JOIN LATERAL custody.position(g.group_id, e.partition) f
        LEFT JOIN cases c ON c.group_id = g.group_id AND c.partition = e.partition
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(x.remaining) FILTER (WHERE x.deadline > at.now), 0)::bigint AS live,
                   coalesce(sum(x.remaining) FILTER (WHERE x.deadline <= at.now), 0)::bigint AS expired,
                   coalesce(range_agg(x.held), '{}') AS held
            FROM at, custody.leases x
            WHERE x.group_id = g.group_id AND x.partition = e.partition AND x.claim_no >= f.oldest_claim) l
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(custody.cardinality(x.ranges)), 0)::bigint AS messages,
                   coalesce(range_agg(x.ranges), '{}') AS ranges
            FROM custody.returned x WHERE x.group_id = g.group_id AND x.partition = e.partition) r
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(x.messages), 0)::bigint AS messages, coalesce(range_agg(x.ranges), '{}') AS ranges
            FROM custody.parked x WHERE x.group_id = g.group_id AND x.partition = e.partition) p),
    figures AS (
        SELECT p.group_id, sum(p.lag) AS lag, sum(p.waiting) AS waiting, sum(p.live) AS live, sum(h.holes) AS holes,
               sum(p.parked) AS parked, sum(p.dead) AS dead, sum(p.held) AS held, min(o.published_at) AS oldest
        FROM places p
        CROSS JOIN LATERAL (
            -- As custody.ack_holes counts them.
            SELECT count(*) AS holes FROM unnest(p.counted + p.behind) r
            WHERE upper(r) < p.frontier AND (isempty(p.behind) OR r && p.counted)) h
        CROSS JOIN LATERAL (
            SELECT coalesce(lower(p.counted + p.behind), CASE WHEN p.lag > 0 THEN p.frontier END) AS lowest) u
        LEFT JOIN LATERAL custody.events_in(p.head, int8multirange(int8range(u.lowest, u.lowest + 1))) o
            ON u.lowest IS NOT NULL
        GROUP BY p.group_id)
    SELECT t.name, g.name, f.lag::bigint, f.waiting::bigint, f.live::bigint, f.holes::bigint, f.parked::bigint,
           f.dead::bigint, (f.lag + f.live + f.waiting + f.parked + f.held)::bigint,
           CASE WHEN f.oldest IS NOT NULL THEN greatest(0, extract(epoch FROM at.now - f.oldest)) END::double precision,
           g.paused_at IS NOT NULL,
           CASE WHEN g.breaker_rate IS NOT NULL OR g.breaker_state <> 'closed' THEN g.breaker_state END,
           g.bindings IS NOT NULL
    FROM at, figures f JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
    ORDER BY t.name, g.name
$$;

CREATE VIEW custody.group_state AS SELECT * FROM custody.group_figures();
