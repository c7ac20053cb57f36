-- Figures of all topics and groups at once, for monitoring. Their cost grows with the exceptions, and with a few index
-- lookups for each group and partition; the log is not scanned.

-- What a topic holds, and how many messages were ever appended to it.
CREATE FUNCTION custody.topic_figures() RETURNS TABLE (topic text, partitions int, messages bigint, appended bigint)
LANGUAGE sql STABLE SET enable_seqscan = off SET jit = off AS $$
    SELECT o.name, o.partitions, sum(t.next_offset - h.first_offset)::bigint, sum(t.next_offset)::bigint
    FROM custody.topics o JOIN custody.heads h USING (topic_id) CROSS JOIN LATERAL custody.tail(h) t
    GROUP BY o.topic_id ORDER BY o.name
$$;

-- When messages of a partition were published. In the open segment, where most of them are, it is one statement for
-- all. The row that holds an offset is the first one from that offset on.
CREATE FUNCTION custody.published_at(p_head custody.heads, p_offsets bigint[])
RETURNS TABLE ("offset" bigint, published_at timestamptz)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_older bigint[] := ARRAY(SELECT o FROM unnest(p_offsets) o WHERE o < (p_head).segment_start);
BEGIN
    RETURN QUERY EXECUTE format(
        'SELECT o, r.published_at FROM unnest($2) o,
         LATERAL (SELECT l.published_at FROM custody.log_%s l WHERE l.partition = $1 AND l."offset" >= o
                  ORDER BY l."offset" LIMIT 1) r
         WHERE o >= $3', (p_head).segment_id) USING (p_head).partition, p_offsets, (p_head).segment_start;
    IF v_older <> '{}' THEN
        RETURN QUERY SELECT e."offset", e.published_at
                     FROM custody.events_in(p_head, custody.offsets_set(v_older)) e;
    END IF;
END $$;

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
        SELECT g.group_id, e.topic_id, e.partition, f.frontier, e.next_offset - f.frontier AS lag, l.live,
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
    lowest AS MATERIALIZED (    -- the first unresolved offset
        SELECT p.group_id, p.topic_id, p.partition,
               coalesce(lower(p.counted + p.behind), CASE WHEN p.lag > 0 THEN p.frontier END) AS "offset"
        FROM places p),
    published AS MATERIALIZED (     -- once for each partition
        SELECT e.topic_id, e.partition, o."offset", o.published_at
        FROM (SELECT u.topic_id, u.partition, array_agg(DISTINCT u."offset") AS offsets
              FROM lowest u WHERE u."offset" IS NOT NULL GROUP BY u.topic_id, u.partition) u
        JOIN ends e USING (topic_id, partition)
        CROSS JOIN LATERAL custody.published_at(e.head, u.offsets) o),
    oldest AS (
        SELECT u.group_id, min(o.published_at) AS oldest
        FROM lowest u JOIN published o USING (topic_id, partition, "offset") GROUP BY u.group_id),
    figures AS (
        SELECT p.group_id, sum(p.lag) AS lag, sum(p.waiting) AS waiting, sum(p.live) AS live, sum(h.holes) AS holes,
               sum(p.parked) AS parked, sum(p.dead) AS dead, sum(p.held) AS held
        FROM places p
        CROSS JOIN LATERAL (
            -- As custody.ack_holes counts them.
            SELECT count(*) AS holes FROM unnest(p.counted + p.behind) r
            WHERE upper(r) < p.frontier AND (isempty(p.behind) OR r && p.counted)) h
        GROUP BY p.group_id)
    SELECT t.name, g.name, f.lag::bigint, f.waiting::bigint, f.live::bigint, f.holes::bigint, f.parked::bigint,
           f.dead::bigint, (f.lag + f.live + f.waiting + f.parked + f.held)::bigint,
           CASE WHEN o.oldest IS NOT NULL THEN greatest(0, extract(epoch FROM at.now - o.oldest)) END::double precision,
           g.paused_at IS NOT NULL,
           CASE WHEN g.breaker_rate IS NOT NULL OR g.breaker_state <> 'closed' THEN g.breaker_state END,
           g.bindings IS NOT NULL
    FROM at, figures f JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
    LEFT JOIN oldest o USING (group_id)
    ORDER BY t.name, g.name
$$;

CREATE VIEW custody.group_state AS SELECT * FROM custody.group_figures();

-- Who worked for which group lately: what each holds under leases, when it claimed last, and how many messages per
-- second it claimed, settled as done and failed in the last p_window, or in the last p_entries of the journal if those
-- cover less. A worker that found nothing to claim has left no trace.
CREATE FUNCTION custody.recent_work(
    p_window interval DEFAULT '1 minute', p_entries int DEFAULT 10000, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (
    topic text, consumer_group text, worker text, in_flight bigint, oldest_lease_age double precision,
    last_claim_age double precision, claimed_rate double precision, done_rate double precision,
    failed_rate double precision
)
LANGUAGE sql STABLE SET enable_seqscan = off SET jit = off AS $$
    WITH at AS MATERIALIZED (SELECT coalesce(p_now, clock_timestamp()) AS now),
    last AS MATERIALIZED (
        SELECT j.at, j.kind, j.group_id, j.worker, j.offsets FROM custody.journal j
        ORDER BY j.entry DESC LIMIT p_entries),
    span AS MATERIALIZED (      -- the time that they cover
        SELECT greatest(1, least(extract(epoch FROM p_window), CASE WHEN count(*) = p_entries
                                 THEN extract(epoch FROM at.now - min(l.at)) END))::double precision AS seconds
        FROM at LEFT JOIN last l ON true GROUP BY at.now),
    settled AS (
        SELECT l.group_id, l.worker, max(l.at) FILTER (WHERE l.kind = 'claim') AS claimed_at,
               sum(n.messages) FILTER (WHERE l.kind = 'claim') AS claimed,
               sum(n.messages) FILTER (WHERE l.kind IN ('ack', 'commit')) AS done,
               sum(n.messages) FILTER (WHERE l.kind IN ('nack', 'dead')) AS failed
        FROM at CROSS JOIN last l
        CROSS JOIN LATERAL (SELECT coalesce(sum(upper(r) - lower(r)), 0) AS messages FROM unnest(l.offsets) r) n
        WHERE l.at > at.now - p_window AND l.kind IN ('claim', 'ack', 'nack', 'dead', 'commit') AND l.worker IS NOT NULL
        GROUP BY l.group_id, l.worker),
    holding AS (
        SELECT x.group_id, x.worker, sum(x.remaining) AS messages, min(x.claimed_at) AS oldest,
               max(x.claimed_at) AS newest
        FROM at, custody.leases x WHERE x.deadline > at.now AND x.worker IS NOT NULL GROUP BY x.group_id, x.worker)
    SELECT t.name, g.name, w.worker, coalesce(h.messages, 0)::bigint,
           CASE WHEN h.oldest IS NOT NULL THEN greatest(0, extract(epoch FROM at.now - h.oldest)) END,
           CASE WHEN w.claimed_at IS NOT NULL THEN greatest(0, extract(epoch FROM at.now - w.claimed_at)) END,
           coalesce(s.claimed, 0) / span.seconds, coalesce(s.done, 0) / span.seconds,
           coalesce(s.failed, 0) / span.seconds
    FROM at, span, (
        SELECT x.group_id, x.worker, max(x.claimed_at) AS claimed_at
        FROM (SELECT group_id, worker, claimed_at FROM settled
              UNION ALL SELECT group_id, worker, newest FROM holding) x GROUP BY x.group_id, x.worker) w
    LEFT JOIN settled s USING (group_id, worker) LEFT JOIN holding h USING (group_id, worker)
    JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
    ORDER BY t.name, g.name, w.worker
$$;
