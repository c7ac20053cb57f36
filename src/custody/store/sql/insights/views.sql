-- Views for SQL: what is in the log, what is not simply done, and what happened.

-- Text as it is. Bytes, and text with a NUL, are escaped: a view must never fail for what a message contains.
CREATE FUNCTION custody.payload_text(p_kind "char", p_payload bytea) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_kind = 'b' OR position('\x00'::bytea IN p_payload) > 0 THEN encode(p_payload, 'escape')
                ELSE convert_from(p_payload, 'UTF8') END
$$;

-- The union of plain tables is inside and the joins are outside: so a join with the view can use the primary key of the
-- log.
CREATE VIEW custody.events AS
SELECT t.name AS topic, e.partition, e."offset", e.key, custody.payload_text(e.kind, e.payload) AS payload, e.headers,
       e.published_at, CASE e.kind WHEN 'j' THEN 'json' WHEN 't' THEN 'text' ELSE 'bytes' END AS payload_kind,
       e.payload AS payload_bytes
FROM (
    SELECT segment_id, partition, "offset", published_at, key, kind, payload, headers FROM custody.log
    WHERE n = 1 AND partition >= 0   -- below 0 is what tasks of pipelines have staged
    UNION ALL
    SELECT b.segment_id, b.partition, b."offset" - b.n + m.i, b.published_at, m.key,
           coalesce(substr(b.kinds, m.i::int, 1)::"char", b.kind),
           substring(b.payloads FROM m.start - b.base + 1 FOR m.stop - m.start), b.headers_each[m.i]
    FROM (SELECT l.*, l.ends[l.n] - octet_length(l.payloads) AS base FROM custody.log l
          WHERE l.n > 1 AND l.partition >= 0) b,
         LATERAL unnest(b.base || b.ends, b.ends, b.keys) WITH ORDINALITY m (start, stop, key, i)
    WHERE m.i <= b.n
    UNION ALL
    SELECT segment_id, partition, "offset", published_at, key, kind, payload, headers FROM custody.kept_events
) e
JOIN custody.segments s USING (segment_id)
JOIN custody.topics t USING (topic_id);

-- The messages [p_from, p_until) of a partition, as in the view. The view unpacks every batch of a topic to find an
-- offset; this reads only what is asked for.
CREATE FUNCTION custody.events_between(p_topic text, p_partition int, p_from bigint, p_until bigint)
RETURNS SETOF custody.events
LANGUAGE sql STABLE ROWS 1000 AS $$
    SELECT p_topic, p_partition, e."offset", e.key, custody.payload_text(e.kind, e.payload), e.headers, e.published_at,
           CASE e.kind WHEN 'j' THEN 'json' WHEN 't' THEN 'text' ELSE 'bytes' END, e.payload
    FROM custody.topics t JOIN custody.heads h USING (topic_id),
         LATERAL custody.events_in(h, int8multirange(int8range(p_from, p_until))) e
    WHERE t.name = p_topic AND h.partition = p_partition AND p_from < p_until
$$;

-- One message, as in the view; no row if there is none.
CREATE FUNCTION custody.event(p_topic text, p_partition int, p_offset bigint) RETURNS SETOF custody.events
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT e.* FROM custody.events_between(p_topic, p_partition, p_offset, p_offset + 1) e
$$;

-- One branch for each source, each with a literal status, so that a filter on the status prunes. A lease past its
-- deadline is expired here, too, folded or not.
CREATE VIEW custody.deliveries AS
SELECT t.name AS topic, c.partition, c."offset" AS event_offset, g.name AS consumer_group, c.key, 'dead' AS status,
       c.attempts, NULL::timestamptz AS run_at, NULL::timestamptz AS locked_at, NULL::text AS locked_by, c.last_error,
       c.updated_at
FROM custody.cases c JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
WHERE c.state = 'dead'
UNION ALL
SELECT t.name, c.partition, c."offset", g.name, c.key, 'ready', c.attempts, c.run_at, NULL, NULL, c.last_error,
       c.updated_at
FROM custody.cases c JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
WHERE c.state IN ('waiting', 'parked')
UNION ALL
SELECT t.name, p.partition, o, g.name, p.key, 'ready', 0, p.parked_at, NULL, NULL, NULL, p.parked_at
FROM custody.parked p JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id),
     -- For an array the planner expects ten rows, not a hundred thousand, and does not compile the query for seconds
     -- (jit).
     unnest(custody.offsets_list(p.ranges)) o
UNION ALL
SELECT t.name, b.partition, k."offset", g.name, k.key, 'ready', b.attempts, b.returned_at, NULL, NULL, b.last_error,
       b.returned_at
FROM custody.returned b JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
JOIN custody.heads h ON h.topic_id = t.topic_id AND h.partition = b.partition,
     LATERAL custody.keys_of(h, b.ranges) k
UNION ALL
SELECT t.name, l.partition, k."offset", g.name, k.key, 'ready', coalesce(c.attempts, l.attempt), l.deadline, NULL, NULL,
       coalesce(c.last_error, 'lease expired'), l.deadline
FROM custody.leases l JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
JOIN custody.heads h ON h.topic_id = t.topic_id AND h.partition = l.partition
CROSS JOIN LATERAL custody.keys_of(h, l.held) k
LEFT JOIN custody.cases c ON l.of_cases AND c.group_id = l.group_id AND c.partition = l.partition
    AND c."offset" = k."offset"
WHERE l.deadline <= clock_timestamp()
UNION ALL
SELECT t.name, l.partition, k."offset", g.name, k.key, 'processing', coalesce(c.attempts, l.attempt), NULL,
       l.claimed_at, l.worker, coalesce(c.last_error, l.last_error), l.claimed_at
FROM custody.leases l JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
JOIN custody.heads h ON h.topic_id = t.topic_id AND h.partition = l.partition
CROSS JOIN LATERAL custody.keys_of(h, l.held) k
LEFT JOIN custody.cases c ON l.of_cases AND c.group_id = l.group_id AND c.partition = l.partition
    AND c."offset" = k."offset"
WHERE l.deadline > clock_timestamp();

CREATE VIEW custody.dead_letters AS
SELECT t.name AS topic, g.name AS consumer_group, c.partition, c."offset", c.key,
       custody.payload_text(c.kind, c.payload) AS payload,
       CASE c.kind WHEN 'j' THEN 'json' WHEN 't' THEN 'text' ELSE 'bytes' END AS payload_kind,
       c.payload AS payload_bytes, c.headers, c.published_at, c.attempts, c.failures, c.dead_reason AS reason,
       c.last_error, c.last_traceback, c.errors, c.first_delivery, c.first_failure, c.updated_at AS died_at, c.held
FROM custody.cases c
JOIN custody.groups g USING (group_id)
JOIN custody.topics t USING (topic_id)
WHERE c.state = 'dead';

-- Dead letters that match, by partition and offset: up to the one that reaches p_bytes of payloads and errors.
CREATE FUNCTION custody.dead(
    p_topic text, p_group text, p_filter custody.dead_filter DEFAULT NULL, p_bytes bigint DEFAULT NULL
) RETURNS SETOF custody.dead_letters
LANGUAGE sql STABLE AS $$
    SELECT (x.letter).*
    FROM (SELECT d.letter, sum(d.size) OVER (ORDER BY m.partition, m."offset") - d.size AS before,
                 m.partition, m."offset"
          FROM custody.dead_matching(custody.lifecycle_group(p_topic, p_group), p_filter) m
          CROSS JOIN LATERAL (
              SELECT l AS letter, octet_length(l.payload_bytes) + pg_column_size(l.errors) AS size
              FROM custody.dead_letters l
              WHERE l.topic = p_topic AND l.consumer_group = p_group AND l.partition = m.partition
                AND l."offset" = m."offset" OFFSET 0) d) x
    WHERE p_bytes IS NULL OR x.before < p_bytes
    ORDER BY x.partition, x."offset"
$$;

CREATE VIEW custody.in_flight AS
SELECT t.name AS topic, g.name AS consumer_group, l.partition, l.lease_id, l.held AS offsets, l.remaining AS messages,
       CASE WHEN l.of_cases THEN NULL ELSE l.attempt END AS attempt, l.worker, l.claimed_at, l.deadline
FROM custody.leases l JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
WHERE l.deadline > clock_timestamp();

-- Keys that cannot go on, what each of them waits for, and how many messages wait behind it.
CREATE VIEW custody.blocked_keys AS
SELECT t.name AS topic, g.name AS consumer_group, k.partition, k.key, c."offset" AS blocked_by,
       CASE WHEN c.state = 'dead' THEN 'held' WHEN c.state = 'leased' THEN 'retrying'
            WHEN c.state = 'waiting' THEN 'backoff'
            ELSE 'in flight' END AS why,
       c.attempts, c.run_at, c.last_error, c.worker, coalesce(c.updated_at, least(p.since, k.since)) AS since,
       coalesce(p.messages, 0) + k.cases AS parked
FROM (
    SELECT group_id, partition, key, sum(cases)::bigint AS cases, min(since) AS since FROM (
        SELECT group_id, partition, key, count(*) FILTER (WHERE state = 'parked') AS cases, min(updated_at) AS since
        FROM custody.cases
        WHERE key IS NOT NULL AND (state <> 'dead' OR held) GROUP BY group_id, partition, key
        UNION ALL
        SELECT DISTINCT group_id, partition, key, 0, NULL::timestamptz FROM custody.parked) x
    GROUP BY group_id, partition, key
) k
JOIN custody.groups g ON g.group_id = k.group_id AND g.ordering = 'key'
JOIN custody.topics t USING (topic_id)
LEFT JOIN LATERAL (
    SELECT * FROM custody.cases x
    WHERE x.group_id = k.group_id AND x.partition = k.partition AND x.key = k.key AND (x.state <> 'dead' OR x.held)
      AND x.state <> 'parked'
    ORDER BY x."offset" LIMIT 1) c ON true
LEFT JOIN LATERAL (
    SELECT sum(x.messages)::bigint AS messages, min(x.parked_at) AS since FROM custody.parked x
    WHERE x.group_id = k.group_id AND x.partition = k.partition AND x.key = k.key) p ON true;

CREATE VIEW custody.history AS
SELECT j.entry, j.at, t.name AS topic, g.name AS consumer_group, j.partition, j.offsets, j.kind, j.lease_id, j.worker,
       j.error, j.detail
FROM custody.journal j JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id);

-- Everything that happened to one message, in every group or in one. If the journal does not go back to its
-- publication, the first row says so.
CREATE FUNCTION custody.trace(p_topic text, p_partition int, p_offset bigint, p_group text DEFAULT NULL)
RETURNS TABLE (at timestamptz, consumer_group text, kind text, attempt bigint, worker text, error text,
               traceback text, lease_id uuid, detail jsonb)
LANGUAGE sql STABLE AS $$
    (SELECT s.dropped_until, coalesce(p_group, '*'), 'forgotten', NULL::bigint, NULL::text,
            'what happened before was dropped from the journal', NULL::text, NULL::uuid, NULL::jsonb
     FROM custody.journal_settings s, custody.topics t JOIN custody.heads h USING (topic_id)
     WHERE t.name = p_topic AND h.partition = p_partition AND s.dropped_until IS NOT NULL AND p_offset >= 0
       AND p_offset < (custody.tail(h)).next_offset
       AND NOT EXISTS (SELECT FROM custody.events_in(h, int8multirange(int8range(p_offset, p_offset + 1))) e
                       WHERE e.published_at > s.dropped_until))
    UNION ALL
    (SELECT h.at, h.consumer_group, h.kind,
           -- Deliveries since the last redrive or rewind, without those that were given back.
           CASE WHEN h.kind = 'dead' OR h.lease_id IS NOT NULL AND h.kind NOT IN ('release', 'later') THEN
               sum(CASE h.kind WHEN 'claim' THEN 1 WHEN 'release' THEN -1 WHEN 'later' THEN -1 ELSE 0 END)
                   OVER (PARTITION BY h.consumer_group, h.life ORDER BY h.entry) END,
           h.worker, CASE WHEN h.detail ? p_offset::text THEN h.detail ->> p_offset::text ELSE h.error END,
           coalesce(h.detail -> 'tracebacks' ->> p_offset::text, h.detail ->> 'traceback'), h.lease_id, h.detail
    FROM (SELECT x.*, count(*) FILTER (WHERE x.kind IN ('redrive', 'rewind'))
                     OVER (PARTITION BY x.consumer_group ORDER BY x.entry) AS life
          FROM custody.history x
          WHERE x.topic = p_topic AND x.partition = p_partition AND x.offsets @> p_offset
            AND (p_group IS NULL OR x.consumer_group = p_group)) h
    ORDER BY h.entry)
$$;
