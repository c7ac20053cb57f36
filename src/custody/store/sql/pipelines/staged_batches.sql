-- Rows of the log that tasks write before the commit. A task that has enough small messages for a partition does not
-- stage them one by one: it writes finished rows into the open segment of the topic, under a negative partition, which
-- no reader asks for. The commit changes the partition and the offset of such a row. Its bodies stay where they are.

-- Says that a stage has rows in the open segment of a topic, so that they are found if their attempt dies. Committed
-- before there is any. `base`: places in the segment from there on belong to this stage alone.
CREATE FUNCTION custody.stage_segment(p_stage text, p_topic_id int, OUT segment_id int, OUT base bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT s.segment_id INTO segment_id FROM custody.segments s
    WHERE s.topic_id = p_topic_id AND s.sealed_at IS NULL;
    IF NOT FOUND THEN
        PERFORM custody.refuse('topic_changed', 'a topic that was written to was deleted meanwhile',
            'Run the batch again.');
    END IF;
    -- The lock keeps the stage until this is recorded.
    SELECT g.stage_id << 24 INTO base FROM custody.stages g WHERE g.name = p_stage FOR KEY SHARE;
    IF NOT FOUND THEN
        PERFORM custody.refuse('stage_lost', format('there is no stage %L', p_stage), 'Run the batch again.');
    END IF;
    INSERT INTO custody.stage_segments (stage, topic_id, segment_id) VALUES (p_stage, p_topic_id, segment_id)
    ON CONFLICT DO NOTHING;
END $$;

-- Writes one row of messages for a partition: the batch in the segment, and in the stage where it is and which messages
-- of the source made it. p_n is the number of the first one within the attempt. p_sources are offsets counted from
-- p_source_offset, and do not decrease.
CREATE FUNCTION custody.stage_batch(
    p_stage text, p_segment int, p_base bigint, p_attempt bigint, p_topic_id int, p_partition int, p_n int,
    p_source_partition int, p_source_offset bigint, p_sources int[], p_keys text[], p_kinds "char"[], p_headers text[],
    p_joined bytea, p_ends int[]
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count int := cardinality(p_ends);
    v_place bigint := p_base + (nextval('custody.stage_places') & 16777215);
    v_kinds text;
BEGIN
    -- As for the other writers: a batch that cannot be cut again would stop all who read the partition.
    IF p_partition < 0 OR nullif(cardinality(p_keys), 0) <> v_count OR nullif(cardinality(p_headers), 0) <> v_count
        OR cardinality(p_kinds) NOT IN (1, v_count) OR cardinality(p_sources) IS DISTINCT FROM v_count
        OR p_ends[1] < 0 OR p_ends[v_count] IS DISTINCT FROM octet_length(p_joined)
        OR p_ends <> ARRAY(SELECT e FROM unnest(p_ends) e ORDER BY e)
        OR p_sources <> ARRAY(SELECT o FROM unnest(p_sources) o ORDER BY o)
        OR NOT custody.fit_a_batch(custody.batch_from(), 0, p_keys, p_kinds, p_headers)
    THEN
        PERFORM custody.refuse('invalid_argument', 'these messages are not a batch',
            'Give a key, a kind, an end and a source for each payload, in order.');
    END IF;
    -- The commit of the claim makes this durable too. If the server crashes before it, the batch is run again.
    PERFORM set_config('synchronous_commit', 'off', true);
    EXECUTE format(
        'INSERT INTO custody.%I (attempt, topic_id, partition, n, source_partition, source_offset, last_source,
                                 segment_id, place, messages, sources)
         VALUES ($1, $2, $3, $4, $5, $6, $6 + $7, $8, $9, $10, $11)', p_stage)
    USING p_attempt, p_topic_id, p_partition, p_n, p_source_partition, p_source_offset, p_sources[v_count], p_segment,
          v_place, v_count, p_sources;
    IF v_count = 1 THEN
        EXECUTE format(
            'INSERT INTO custody.log_%1$s (segment_id, partition, "offset", published_at, key, kind, payload, headers)
             VALUES (%1$s, $1, $2, clock_timestamp(), $3, $4, $5, $6)', p_segment)
        USING -1 - p_partition, v_place, p_keys[1], p_kinds[1], p_joined, p_headers[1]::jsonb;
        RETURN;
    END IF;
    IF cardinality(p_kinds) > 1 THEN
        v_kinds := array_to_string(p_kinds, '');
    END IF;
    EXECUTE format(
        'INSERT INTO custody.log_%1$s (segment_id, partition, "offset", published_at, kind, n, payloads, ends, keys,
                                       kinds, headers_each)
         VALUES (%1$s, $1, $2, clock_timestamp(), $3, $4, $5, $6, $7, $8, $9)', p_segment)
    USING -1 - p_partition, v_place, p_kinds[1], v_count, p_joined, p_ends, nullif(p_keys, '{}'), v_kinds,
          nullif(p_headers, '{}')::jsonb[];
END $$;

-- The messages of a staged row, with their sources. What is stored beside the table is read once: `||` makes a copy.
CREATE FUNCTION custody.staged_messages(p_segment int, p_partition int, p_place bigint, p_sources int[])
RETURNS TABLE (i bigint, source int, key text, kind "char", payload bytea, headers jsonb)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF to_regclass('custody.log_' || p_segment) IS NOT NULL THEN
        RETURN QUERY EXECUTE format(
            'SELECT m.i, m.source, CASE WHEN l.n = 1 THEN l.key ELSE m.key END, coalesce(m.kind::"char", l.kind),
                    m.payload, CASE WHEN l.n = 1 THEN l.headers ELSE m.headers END
             FROM custody.log_%s l,
                  LATERAL unnest($3, CASE WHEN l.n = 1 THEN ARRAY[l.payload]
                                          ELSE custody.split_payloads(substring(l.payloads FROM 1),
                                                                     l.ends || ''{}'') END,
                                 l.keys, string_to_array(l.kinds, NULL), l.headers_each)
                       WITH ORDINALITY m (source, payload, key, kind, headers, i)
             WHERE l.partition = $1 AND l."offset" = $2', p_segment)
        USING -1 - p_partition, p_place, p_sources;
    END IF;
END $$;

-- The messages of a staged batch whose sources are in a set, as arguments of the function that appends to a segment.
CREATE FUNCTION custody.cut_staged(
    p_segment int, p_partition int, p_place bigint, p_sources int[], p_first bigint, p_set int8multirange,
    OUT keys text[], OUT kinds "char"[], OUT headers text[], OUT joined bytea, OUT ends int[]
)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF to_regclass('custody.log_' || p_segment) IS NOT NULL THEN
        EXECUTE format(
            'SELECT CASE WHEN l.keys IS NULL THEN ''{}'' ELSE m.keys END,
                    CASE WHEN l.kinds IS NULL THEN ARRAY[l.kind] ELSE m.kinds END,
                    CASE WHEN l.headers_each IS NULL THEN ''{}'' ELSE m.headers END, m.joined, m.ends
             FROM custody.log_%s l,
                  LATERAL (SELECT array_agg(x.key) AS keys, array_agg(x.kind::"char") AS kinds,
                                  array_agg(x.headers::text) AS headers, string_agg(x.payload, '''') AS joined,
                                  array_agg(x.stop) AS ends
                           FROM (SELECT y.*, sum(octet_length(y.payload)) OVER (ORDER BY y.i)::int AS stop
                                 FROM (SELECT u.i, u.key, u.kind, u.headers,
                                              substring(b.payloads FROM u.start + 1 FOR u.stop - u.start) AS payload
                                       FROM (SELECT substring(l.payloads FROM 1) AS payloads OFFSET 0) b,
                                            unnest(0 || l.ends, l.ends, $3, l.keys, string_to_array(l.kinds, NULL),
                                                   l.headers_each)
                                                WITH ORDINALITY u (start, stop, source, key, kind, headers, i)
                                       WHERE $5 @> $4 + u.source
                                       OFFSET 0) y
                                 ORDER BY y.i) x) m
             WHERE l.partition = $1 AND l."offset" = $2', p_segment)
        INTO keys, kinds, headers, joined, ends
        USING -1 - p_partition, p_place, p_sources, p_first, p_set;
    END IF;
END $$;

-- Gives staged rows their offsets, in this order, and returns the number of messages. The caller holds the head. Rows
-- in a segment that was sealed meanwhile are copied into the open one.
CREATE FUNCTION custody.move_staged(
    p_head custody.heads, p_segments int[], p_places bigint[], p_messages int[], p_now timestamptz
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_tail    record := custody.tail(p_head);
    v_at      timestamptz := greatest(coalesce(p_now, clock_timestamp()), v_tail.newest);
    v_offsets bigint[];
    v_segment int;
    v_moved   bigint;
    v_rows    bigint := 0;
BEGIN
    -- This runs as the owner: nobody may move what is published.
    IF (p_head).partition < 0 THEN
        PERFORM custody.refuse('invalid_argument', format('there is no partition %s', (p_head).partition));
    END IF;
    SELECT array_agg(m.last ORDER BY m.i) INTO v_offsets
    FROM (SELECT x.i, v_tail.next_offset - 1 + sum(x.n) OVER (ORDER BY x.i) AS last
          FROM unnest(p_messages) WITH ORDINALITY x (n, i)) m;
    FOR v_segment IN SELECT DISTINCT unnest(p_segments) LOOP
        IF v_segment = (p_head).segment_id THEN
            EXECUTE format(
                'UPDATE custody.log_%1$s l SET partition = $1, "offset" = m.last, published_at = $2
                 FROM unnest($3, $4, $5) m (segment, place, last)
                 WHERE m.segment = %1$s AND l.partition = -1 - $1 AND l."offset" = m.place', v_segment)
            USING (p_head).partition, v_at, p_segments, p_places, v_offsets;
        ELSIF to_regclass('custody.log_' || v_segment) IS NOT NULL THEN
            EXECUTE format(
                'WITH gone AS (
                     DELETE FROM custody.log_%1$s l USING unnest($3, $4, $5) m (segment, place, last)
                     WHERE m.segment = %1$s AND l.partition = -1 - $1 AND l."offset" = m.place
                     RETURNING l.*, m.last)
                 INSERT INTO custody.log_%2$s (segment_id, partition, "offset", published_at, key, kind, payload,
                                               headers, n, payloads, ends, keys, kinds, headers_each)
                 SELECT %2$s, $1, g.last, $2, g.key, g.kind, g.payload, g.headers, g.n, g.payloads, g.ends, g.keys,
                        g.kinds, g.headers_each FROM gone g', v_segment, (p_head).segment_id)
            USING (p_head).partition, v_at, p_segments, p_places, v_offsets;
        ELSE
            CONTINUE;
        END IF;
        GET DIAGNOSTICS v_moved = ROW_COUNT;
        v_rows := v_rows + v_moved;
    END LOOP;
    IF v_rows <> cardinality(p_places) THEN
        PERFORM custody.refuse('stage_lost',
            format('%s of %s staged batches are there', v_rows, cardinality(p_places)),
            'Run the batch again: retention drops what is staged in a segment.');
    END IF;
    RETURN v_offsets[cardinality(v_offsets)] + 1 - v_tail.next_offset;
END $$;

-- Staged rows of a partition that follow each other: whole ones, which are moved as they are; parts of rows, which are
-- cut; or others, of which the messages that count are sorted and appended.
CREATE TYPE custody.stage_run AS (
    partition int, form text, wanted bigint, segments int[], places bigint[], messages int[], tids tid[]
);

-- Publishes what is staged for a topic, as publish_staged does, if some of it are finished rows. A row is moved as it
-- is, or cut if some of its messages do not count, unless other rows have messages of sources between its own. What is
-- to be done is found out before the heads are locked.
CREATE FUNCTION custody.publish_batches(
    p_stage text, p_attempts bigint[], p_topics int[], p_partitions int[], p_topic custody.topics, p_of int,
    p_exact boolean, p_source_partitions int[], p_sources int8multirange[], p_now timestamptz,
    OUT staged bigint, OUT written bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_runs    custody.stage_run[];
    v_run     custody.stage_run;
    v_head    custody.heads;
    v_tid     tid;
    v_cut     record;
    v_written bigint;
BEGIN
    EXECUTE format(
        'SELECT coalesce(sum(coalesce(s.messages, 1)), 0) FROM custody.%I s
         WHERE s.topic_id = $1 AND s.attempt IN (SELECT unnest($2))', p_stage)
    INTO staged USING (p_topic).topic_id, p_attempts;
    EXECUTE format(
        'WITH pieces AS (%s)
         SELECT array_agg(ROW(r.partition, r.form, r.wanted, r.segments, r.places, r.messages, r.tids)
                          ::custody.stage_run ORDER BY r.partition, r.number)
         FROM (SELECT o.partition, o.form, sum(o.wanted)::bigint AS wanted, min(o.number) AS number,
                      array_agg(o.segment_id ORDER BY o.number) AS segments,
                      array_agg(o.place ORDER BY o.number) AS places,
                      array_agg(o.messages ORDER BY o.number) AS messages, array_agg(o.tid ORDER BY o.number) AS tids
               FROM (SELECT w.*, w.number - row_number() OVER (PARTITION BY w.partition, w.form ORDER BY w.number)
                                 AS run
                     FROM (SELECT p.*, row_number() OVER every AS number,
                                  CASE WHEN p.place IS NULL
                                            OR p.first < max(p.last) OVER (same ROWS BETWEEN UNBOUNDED PRECEDING
                                                                           AND 1 PRECEDING)
                                            OR p.last > lead(p.first) OVER same THEN ''mixed''
                                       WHEN p.wanted = p.messages THEN ''whole''
                                       ELSE ''part'' END AS form
                           FROM pieces p WHERE p.wanted > 0
                           WINDOW every AS (PARTITION BY p.partition ORDER BY p.major, p.first, p.attempt, p.n),
                                  same AS (PARTITION BY p.partition, p.major ORDER BY p.first, p.attempt, p.n)) w) o
               GROUP BY o.partition, o.form, o.run) r',
        CASE WHEN p_exact THEN format(
            'SELECT s.ctid AS tid, s.partition, s.attempt, s.n, s.segment_id, s.place,
                    coalesce(s.messages, 1) AS messages, coalesce(s.messages, 1) AS wanted, a.major,
                    s.n::bigint AS first, s.n::bigint + coalesce(s.messages, 1) - 1 AS last
             FROM custody.%I s
             JOIN (SELECT x.attempt, x.partition, min(x.i) AS major
                   FROM unnest($1, $2, $3) WITH ORDINALITY x (attempt, topic_id, partition, i)
                   WHERE x.topic_id = $4 GROUP BY x.attempt, x.partition) a USING (attempt, partition)
             WHERE s.topic_id = $4', p_stage)
        ELSE format(
            'SELECT s.ctid AS tid, s.partition, s.attempt, s.n, s.segment_id, s.place,
                    coalesce(s.messages, 1) AS messages,
                    CASE WHEN a.offsets @> int8range(s.source_offset, coalesce(s.last_source, s.source_offset), ''[]'')
                         THEN coalesce(s.messages, 1)
                         ELSE (SELECT count(*) FROM unnest(s.sources) x WHERE a.offsets @> s.source_offset + x)::int
                         END AS wanted,
                    s.source_partition::bigint AS major, s.source_offset AS first,
                    coalesce(s.last_source, s.source_offset) AS last
             FROM custody.%I s JOIN unnest($5, $6) a (source_partition, offsets) USING (source_partition)
             WHERE s.topic_id = $4 AND s.attempt IN (SELECT unnest($1))', p_stage) END)
    INTO v_runs USING p_attempts, p_topics, p_partitions, (p_topic).topic_id, p_source_partitions, p_sources;
    written := 0;
    IF v_runs IS NULL THEN
        RETURN;
    END IF;
    -- A statement of its own, so that it runs once.
    PERFORM custody.reserve((p_topic).name, w.partitions, w.counts, NULL, p_now, p_of)
    FROM (SELECT array_agg(y.partition) AS partitions, array_agg(y.wanted) AS counts
          FROM (SELECT r.partition, sum(r.wanted)::int AS wanted FROM unnest(v_runs) r GROUP BY r.partition) y) w;
    FOREACH v_run IN ARRAY v_runs LOOP
        IF v_head.partition IS DISTINCT FROM v_run.partition THEN
            SELECT h.* INTO v_head FROM custody.heads h
            WHERE h.topic_id = (p_topic).topic_id AND h.partition = v_run.partition;
        END IF;
        IF v_run.form = 'whole' THEN
            v_written := custody.move_staged(v_head, v_run.segments, v_run.places, v_run.messages, p_now);
        ELSIF v_run.form = 'part' THEN
            v_written := 0;
            FOREACH v_tid IN ARRAY v_run.tids LOOP
                EXECUTE format(
                    'SELECT c.* FROM custody.%I s, unnest($2, $3) a (source_partition, offsets),
                            custody.cut_staged(s.segment_id, s.partition, s.place, s.sources, s.source_offset,
                                               a.offsets) c
                     WHERE s.ctid = $1 AND a.source_partition = s.source_partition', p_stage)
                INTO v_cut USING v_tid, p_source_partitions, p_sources;
                IF v_cut.ends IS NOT NULL THEN
                    EXECUTE format('SELECT custody.append_%s($1, $2, $3, $4, NULL, $5, NULL, $6, $7, $8)',
                                   v_head.segment_id)
                    USING v_head.topic_id, v_head.partition, v_cut.keys, v_cut.kinds, v_cut.headers, p_now,
                          v_cut.joined, v_cut.ends;
                    v_written := v_written + cardinality(v_cut.ends);
                END IF;
            END LOOP;
        ELSE
            v_written := custody.put_staged(
                format(
                    'SELECT s.partition, m.key, m.kind, m.payload, m.headers,
                            CASE WHEN %1$L THEN t.i ELSE s.source_partition END AS first, m.source AS second,
                            m.n AS third
                     FROM unnest($6) WITH ORDINALITY t (tid, i)
                     JOIN custody.%2$I s ON s.ctid = t.tid
                     LEFT JOIN unnest($3, $5) a (source_partition, offsets)
                         ON a.source_partition = s.source_partition,
                     LATERAL (SELECT s.key, s.kind, s.payload, s.headers, s.source_offset AS source, s.n::bigint AS n
                              WHERE s.place IS NULL
                              UNION ALL
                              SELECT b.key, b.kind, b.payload, b.headers, s.source_offset + b.source, s.n + b.i - 1
                              FROM custody.staged_messages(s.segment_id, s.partition, s.place, s.sources) b
                              WHERE s.place IS NOT NULL) m
                     WHERE %1$L OR a.offsets @> m.source', p_exact, p_stage),
                (p_topic).topic_id, p_now, '{}', '{}', CASE WHEN p_exact THEN '{}' ELSE p_source_partitions END,
                CASE WHEN p_exact THEN '{}' ELSE p_sources END, v_run.tids);
        END IF;
        IF v_written <> v_run.wanted THEN
            PERFORM custody.refuse('stage_lost', format('%s of %s staged messages are there', v_written, v_run.wanted),
                'Run the batch again: retention drops what is staged in a segment.');
        END IF;
        written := written + v_written;
    END LOOP;
END $$;

-- Removes the rows of a stage that were not published: of attempts that died, or that the commit did not name. Nobody
-- may write into the stage any more.
CREATE FUNCTION custody.remove_staged(p_stage text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_there record;
BEGIN
    FOR v_there IN
        SELECT x.segment_id, t.partitions, g.stage_id << 24 AS base
        FROM custody.stage_segments x JOIN custody.stages g ON g.name = x.stage
        JOIN custody.topics t USING (topic_id) WHERE x.stage = p_stage
    LOOP
        IF to_regclass('custody.log_' || v_there.segment_id) IS NOT NULL THEN
            EXECUTE format(
                'DELETE FROM custody.log_%s l USING generate_series(-$1, -1) p
                 WHERE l.partition = p AND l."offset" >= $2 AND l."offset" < $3', v_there.segment_id)
            USING v_there.partitions, v_there.base, v_there.base + 16777216;
        END IF;
    END LOOP;
END $$;
