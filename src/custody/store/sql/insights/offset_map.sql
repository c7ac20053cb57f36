-- The state of the messages of a group by offset, for a picture: counted in ranges of the same width, the bins. What is
-- in none of these counts is done if it is below the frontier, and was never delivered if it is not. The cost grows
-- with the exceptions, and not with the log.
CREATE FUNCTION custody.offset_map(
    p_topic text, p_group text, p_partition int DEFAULT NULL, p_from_offset bigint DEFAULT NULL,
    p_until_offset bigint DEFAULT NULL, p_bins int DEFAULT 200, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (
    partition int, first_offset bigint, until_offset bigint, frontier bigint, width bigint, bins int[],
    in_flight bigint[], waiting bigint[], parked bigint[], dead bigint[]
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
    v_group custody.groups := custody.group_named(p_topic, p_group);
BEGIN
    RETURN QUERY
    SELECT h.partition, s.lo, s.hi, f.frontier, s.width, b.bins, b.in_flight, b.waiting, b.parked, b.dead
    FROM custody.heads h
    CROSS JOIN LATERAL custody.tail(h) t
    CROSS JOIN LATERAL custody.position(v_group.group_id, h.partition) f
    CROSS JOIN LATERAL (
        SELECT least(greatest(h.first_offset, p_from_offset), t.next_offset) AS lo,
               least(t.next_offset, p_until_offset) AS hi OFFSET 0) e
    CROSS JOIN LATERAL (
        SELECT e.lo, greatest(e.lo, e.hi) AS hi,
               greatest(1, (greatest(e.lo, e.hi) - e.lo + p_bins - 1) / p_bins) AS width OFFSET 0) s
    CROSS JOIN LATERAL (
        SELECT array_agg(c.bin::int ORDER BY c.bin) AS bins, array_agg(c.in_flight ORDER BY c.bin) AS in_flight,
               array_agg(c.waiting ORDER BY c.bin) AS waiting, array_agg(c.parked ORDER BY c.bin) AS parked,
               array_agg(c.dead ORDER BY c.bin) AS dead
        FROM (
            SELECT y.bin, coalesce(sum(y.n) FILTER (WHERE y.state = 'in_flight'), 0)::bigint AS in_flight,
                   coalesce(sum(y.n) FILTER (WHERE y.state = 'waiting'), 0)::bigint AS waiting,
                   coalesce(sum(y.n) FILTER (WHERE y.state = 'parked'), 0)::bigint AS parked,
                   coalesce(sum(y.n) FILTER (WHERE y.state = 'dead'), 0)::bigint AS dead
            FROM (
                SELECT x.state, (x."offset" - s.lo) / s.width AS bin, 1::bigint AS n
                FROM custody.cases x
                WHERE x.group_id = v_group.group_id AND x.partition = h.partition
                  AND x."offset" >= s.lo AND x."offset" < s.hi AND x.state IN ('waiting', 'parked', 'dead')
                UNION ALL
                SELECT z.state, g.bin,
                       least(upper(r.r), s.lo + (g.bin + 1) * s.width) - greatest(lower(r.r), s.lo + g.bin * s.width)
                FROM (
                    SELECT CASE WHEN x.deadline > v_now THEN 'in_flight' ELSE 'waiting' END AS state, x.held AS ranges
                    FROM custody.leases x
                    WHERE x.group_id = v_group.group_id AND x.partition = h.partition AND x.claim_no >= f.oldest_claim
                    UNION ALL
                    SELECT 'waiting', x.ranges FROM custody.returned x
                    WHERE x.group_id = v_group.group_id AND x.partition = h.partition
                    UNION ALL
                    SELECT 'parked', x.ranges FROM custody.parked x
                    WHERE x.group_id = v_group.group_id AND x.partition = h.partition
                ) z
                CROSS JOIN LATERAL unnest(z.ranges * int8multirange(int8range(s.lo, s.hi))) r (r)
                CROSS JOIN LATERAL generate_series(
                    (lower(r.r) - s.lo) / s.width, (upper(r.r) - 1 - s.lo) / s.width) g (bin)
            ) y GROUP BY y.bin
        ) c
    ) b
    WHERE h.topic_id = v_group.topic_id AND (p_partition IS NULL OR h.partition = p_partition)
    ORDER BY h.partition;
END $$;
