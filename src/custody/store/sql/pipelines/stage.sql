-- Staging. Tasks write their output into an unlogged table, each attempt under its own number, or as finished rows into
-- the log (staged_batches.sql). One transaction then publishes the attempts that count. Output of other attempts is
-- never read.

-- Creates the table if there is none, and drops those that somebody left a day ago.
CREATE FUNCTION custody.open_stage(p_stage text, p_now timestamptz DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now timestamptz := coalesce(p_now, clock_timestamp());
    v_old text;
BEGIN
    IF to_regclass('custody.' || quote_ident(p_stage)) IS NOT NULL THEN
        RETURN p_stage;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('custody.stages'), hashtext(p_stage));
    -- A query: to_regclass may still answer from the session's cache, from before the wait.
    IF EXISTS (SELECT FROM pg_class WHERE relnamespace = 'custody'::regnamespace AND relname = p_stage) THEN
        RETURN p_stage;
    END IF;
    FOR v_old IN SELECT name FROM custody.stages WHERE opened_at < v_now - interval '1 day' AND name <> p_stage LOOP
        PERFORM custody.drop_stage(v_old);
    END LOOP;
    INSERT INTO custody.stages VALUES (p_stage, v_now) ON CONFLICT (name) DO UPDATE SET opened_at = excluded.opened_at;
    EXECUTE format(
        'CREATE UNLOGGED TABLE custody.%I (
             attempt bigint NOT NULL, topic_id int NOT NULL, partition int NOT NULL, n int NOT NULL,
             source_partition int NOT NULL, source_offset bigint NOT NULL,
             key text, kind "char", payload bytea, headers jsonb,
             -- Instead of a message, a row of the log: where it is, and the sources of its messages.
             last_source bigint, segment_id int, place bigint, messages int, sources int[],
             CHECK (num_nulls(kind, payload) = num_nonnulls(place, sources) AND num_nulls(kind, payload) IN (0, 2)))
         WITH (autovacuum_enabled = off)', p_stage);
    EXECUTE format('ALTER TABLE custody.%I ALTER sources SET STORAGE EXTERNAL', p_stage);
    PERFORM custody.grant_as(p_stage, 'custody.suspects');
    RETURN p_stage;
END $$;

-- Drops a stage and what it has in the log. Returns false if somebody still writes into it: it is dropped another time.
CREATE FUNCTION custody.drop_stage(p_stage text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' AS $$
BEGIN
    -- First the lock, so that nobody writes any more.
    IF EXISTS (SELECT FROM pg_class WHERE relnamespace = 'custody'::regnamespace AND relname = p_stage) THEN
        EXECUTE format('LOCK TABLE custody.%I IN ACCESS EXCLUSIVE MODE', p_stage);
    END IF;
    PERFORM custody.remove_staged(p_stage);
    EXECUTE format('DROP TABLE IF EXISTS custody.%I', p_stage);
    DELETE FROM custody.stages WHERE name = p_stage;
    RETURN true;
EXCEPTION WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
    RETURN false;       -- undefined_table: somebody else drops it, or a segment, at this moment
END $$;

-- Publishes the output of the named attempts: p_counts messages of each attempt for each partition of each topic
-- (p_topics are their ids, p_of the number of partitions among which the tasks placed the messages). With p_exact every
-- staged message is published, at the place that its task gave it. Else only the output of p_sources (a set of offsets
-- for each source partition) is published, in the order of the source. The heads are locked until the caller commits.
-- Messages under a negative topic id are delayed: see stage_delayed.
CREATE FUNCTION custody.publish_staged(
    p_stage text, p_attempts bigint[], p_topics int[], p_partitions int[], p_counts int[], p_of int[], p_exact boolean,
    p_source_partitions int[] DEFAULT '{}', p_sources int8multirange[] DEFAULT '{}', p_now timestamptz DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = on SET jit = off AS $$
DECLARE
    v_placed  record;
    v_topic   custody.topics;
    v_staged  bigint;
    v_written bigint;
    v_total   bigint := 0;
BEGIN
    PERFORM custody.require_read_committed();
    IF to_regclass('custody.' || quote_ident(p_stage)) IS NULL AND cardinality(p_counts) > 0 THEN
        PERFORM custody.refuse('stage_lost', format('there is no stage %L', p_stage), 'Run the batch again.');
    END IF;
    FOR v_placed IN
        SELECT w.topic_id, min(w.partitions) AS of, max(w.partitions) <> min(w.partitions) AS torn,
               sum(w.messages) AS messages
        FROM unnest(p_topics, p_counts, p_of) w (topic_id, messages, partitions) GROUP BY w.topic_id
        ORDER BY abs(w.topic_id), w.topic_id
    LOOP
        SELECT * INTO v_topic FROM custody.topics WHERE topic_id = abs(v_placed.topic_id);
        IF NOT FOUND OR v_placed.torn THEN
            PERFORM custody.refuse('topic_changed', 'a topic that was written to has changed meanwhile',
                'Run the batch again.');
        END IF;
        IF v_placed.topic_id < 0 THEN
            -- All heads of the topic at once, including those that are locked below.
            PERFORM custody.lock_heads(v_topic, array_agg(w.partition), v_placed.of)
            FROM unnest(p_topics, p_partitions) w (topic_id, partition) WHERE abs(w.topic_id) = v_topic.topic_id;
            SELECT d.staged, d.stored INTO v_staged, v_written
            FROM custody.stage_delayed(p_stage, p_attempts, v_topic, NOT p_exact, p_source_partitions, p_sources,
                                       p_now) d;
        ELSIF EXISTS (SELECT FROM custody.stage_segments x
                      WHERE x.stage = p_stage AND x.topic_id = v_topic.topic_id) THEN
            SELECT b.staged, b.written INTO v_staged, v_written
            FROM custody.publish_batches(p_stage, p_attempts, p_topics, p_partitions, v_topic, v_placed.of, p_exact,
                                         p_source_partitions, p_sources, p_now) b;
        ELSIF p_exact THEN
            -- A statement of its own, so that it runs once: each call would give the partition another time.
            PERFORM custody.reserve(v_topic.name, w.partitions, w.counts, NULL, p_now, v_placed.of)
            FROM (SELECT array_agg(y.partition) AS partitions, array_agg(y.messages) AS counts
                  FROM (SELECT z.partition, sum(z.messages)::int AS messages
                        FROM unnest(p_topics, p_partitions, p_counts) z (topic_id, partition, messages)
                        WHERE z.topic_id = v_placed.topic_id GROUP BY z.partition) y) w;
            v_written := custody.put_staged(
                format('SELECT s.*, a.place AS first, 0::bigint AS second, s.n AS third
                        FROM custody.%I s
                        JOIN (SELECT attempt, partition, place
                              FROM unnest($1, $2, $3) WITH ORDINALITY x (attempt, topic_id, partition, place)
                              WHERE topic_id = $4) a USING (attempt, partition)
                        WHERE s.topic_id = $4', p_stage),
                v_topic.topic_id, p_now, p_attempts, p_topics, p_partitions, '{}');
            v_staged := v_written;
        ELSE
            EXECUTE format(
                'SELECT count(*) FROM custody.%I s WHERE s.topic_id = $1 AND s.attempt IN (SELECT unnest($2))', p_stage)
            INTO v_staged USING v_placed.topic_id, p_attempts;
            v_written := custody.publish_sorted(p_stage, p_attempts, v_topic, v_placed.of, p_source_partitions,
                                                p_sources, p_now);
        END IF;
        IF v_staged <> v_placed.messages THEN
            PERFORM custody.refuse('stage_lost',
                format('%s of %s staged messages are there', v_staged, v_placed.messages),
                'Run the batch again: a crash of the database empties what is staged.');
        END IF;
        v_total := v_total + v_written;
    END LOOP;
    RETURN v_total;
END $$;

-- Stores staged messages that are delayed. A header has their time, or the number of seconds from now on (+3.5). With
-- p_chosen only the output of p_sources. The caller holds the heads.
CREATE FUNCTION custody.stage_delayed(
    p_stage text, p_attempts bigint[], p_topic custody.topics, p_chosen boolean, p_source_partitions int[],
    p_sources int8multirange[], p_now timestamptz, OUT staged bigint, OUT stored bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
    v_batch record;
BEGIN
    EXECUTE format(
        'SELECT count(*) AS staged, array_agg(w.partition) AS partitions, array_agg(w.key) AS keys,
        array_agg(w.kind::text) AS kinds,
                array_agg(w.payload) AS payloads, array_agg((w.headers - ''x-custody-deliver-at'')::text) AS headers,
                array_agg(CASE WHEN left(w.due, 1) <> ''+'' THEN w.due::timestamptz END) AS times,
                array_agg(CASE WHEN left(w.due, 1) = ''+'' THEN w.due::double precision END) AS delays,
                array_agg(w.taken) AS taken
         FROM (SELECT s.*, s.headers ->> ''x-custody-deliver-at'' AS due,
                      NOT $3 OR a.offsets @> s.source_offset AS taken
               FROM custody.%I s LEFT JOIN unnest($4, $5) a (source_partition, offsets) USING (source_partition)
               WHERE s.topic_id = $1 AND s.attempt IN (SELECT unnest($2))
               ORDER BY s.source_partition, s.source_offset, s.n) w', p_stage)
    INTO v_batch USING -(p_topic).topic_id, p_attempts, p_chosen, p_source_partitions, p_sources;
    staged := v_batch.staged;
    stored := 0;
    IF NOT true = ANY (v_batch.taken) THEN
        RETURN;
    END IF;
    SELECT count(*) INTO stored
    FROM (SELECT array_agg(m.p ORDER BY m.n) AS partitions, array_agg(m.k ORDER BY m.n) AS keys,
                 array_agg(m.x ORDER BY m.n) AS kinds, array_agg(m.d ORDER BY m.n) AS payloads,
                 array_agg(nullif(m.h, '{}') ORDER BY m.n) AS headers, array_agg(m.t ORDER BY m.n) AS times,
                 array_agg(m.s ORDER BY m.n) AS delays
          FROM unnest(v_batch.partitions, v_batch.keys, v_batch.kinds, v_batch.payloads, v_batch.headers, v_batch.times,
                      v_batch.delays, v_batch.taken)
               WITH ORDINALITY m (p, k, x, d, h, t, s, taken, n)
          WHERE m.taken) b,
         custody.publish_delayed((p_topic).name, b.partitions, b.keys, b.kinds, b.payloads, b.headers, b.times,
                                 b.delays, p_now => v_now, p_of => (p_topic).partitions) r;
END $$;

-- Appends the messages that a query finds in a stage, in the order of its columns first, second and third. They are
-- collected by the thousand and by the megabyte, because an array has a limit. The caller holds the heads.
CREATE FUNCTION custody.put_staged(
    p_query text, p_topic_id int, p_now timestamptz, p_attempts bigint[], p_topics int[], p_partitions int[],
    p_sources int8multirange[], p_tids tid[] DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_batch   record;
    v_head    custody.heads;
    v_written bigint := 0;
BEGIN
    FOR v_batch IN EXECUTE format(
        'SELECT y.partition, array_agg(y.key ORDER BY y.place) AS keys, array_agg(y.kind ORDER BY y.place) AS kinds,
                array_agg(y.payload ORDER BY y.place) AS payloads,
                array_agg(y.headers::text ORDER BY y.place) AS headers
         FROM (SELECT x.partition, x.key, x.kind, x.payload, x.headers, row_number() OVER w AS place,
                      sum(octet_length(x.payload)) OVER w AS bytes
               FROM (%s) x
               WINDOW w AS (PARTITION BY x.partition ORDER BY x.first, x.second, x.third ROWS UNBOUNDED PRECEDING)) y
         GROUP BY y.partition, (y.place - 1) / 1000, (y.bytes / 1000000)::bigint
         ORDER BY y.partition, (y.place - 1) / 1000, (y.bytes / 1000000)::bigint', p_query)
    USING p_attempts, p_topics, p_partitions, p_topic_id, p_sources, p_tids
    LOOP
        IF v_head.partition IS DISTINCT FROM v_batch.partition THEN
            SELECT h.* INTO v_head FROM custody.heads h
            WHERE h.topic_id = p_topic_id AND h.partition = v_batch.partition;
        END IF;
        PERFORM custody.put_at_head(v_head, v_batch.keys, v_batch.kinds, v_batch.payloads, v_batch.headers, p_now);
        v_written := v_written + cardinality(v_batch.payloads);
    END LOOP;
    RETURN v_written;
END $$;

CREATE FUNCTION custody.publish_sorted(
    p_stage text, p_attempts bigint[], p_topic custody.topics, p_of int, p_source_partitions int[],
    p_sources int8multirange[], p_now timestamptz
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_wanted  record;
    v_written bigint;
BEGIN
    EXECUTE format(
        'SELECT array_agg(w.partition) AS partitions, array_agg(w.messages) AS counts FROM (
             SELECT s.partition, count(*)::int AS messages
             FROM custody.%I s JOIN unnest($2, $3) a (source_partition, offsets) USING (source_partition)
             WHERE s.topic_id = $4 AND s.attempt IN (SELECT unnest($1)) AND a.offsets @> s.source_offset
             GROUP BY s.partition) w', p_stage)
    INTO v_wanted USING p_attempts, p_source_partitions, p_sources, (p_topic).topic_id;
    IF v_wanted.partitions IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM custody.reserve((p_topic).name, v_wanted.partitions, v_wanted.counts, NULL, p_now, p_of);
    v_written := custody.put_staged(
        format('SELECT s.*, s.source_partition::bigint AS first, s.source_offset AS second, s.n AS third
                FROM custody.%I s JOIN unnest($3, $5) a (source_partition, offsets) USING (source_partition)
                WHERE s.topic_id = $4 AND s.attempt IN (SELECT unnest($1)) AND a.offsets @> s.source_offset', p_stage),
        (p_topic).topic_id, p_now, p_attempts, '{}', p_source_partitions, p_sources);
    RETURN v_written;
END $$;

-- The plain sink: publishes a batch of a streaming query once, however often it is replayed and whatever its topics
-- are. Returns null if it was published before. Without a query it is always published.
CREATE FUNCTION custody.sink_commit(
    p_query text, p_batch bigint, p_stage text, p_attempts bigint[], p_topics int[], p_partitions int[], p_counts int[],
    p_of int[], p_now timestamptz DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_published bigint;
BEGIN
    PERFORM custody.require_read_committed();
    IF p_query IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtext('custody.sinks'), hashtext(p_query));
        IF EXISTS (SELECT FROM custody.sink_batches WHERE query_id = p_query AND batch_id = p_batch) THEN
            RETURN NULL;
        END IF;
    END IF;
    v_published := custody.publish_staged(p_stage, p_attempts, p_topics, p_partitions, p_counts, p_of, true,
                                          p_now => p_now);
    IF p_query IS NOT NULL THEN
        -- After the heads are locked, as in delete_topic: the topics cannot be deleted any more.
        INSERT INTO custody.sink_batches
        SELECT p_query, w.topic_id, p_batch, sum(w.messages), coalesce(p_now, clock_timestamp())
        FROM unnest(p_topics, p_counts) w (topic_id, messages) GROUP BY w.topic_id;
        -- Spark replays only the last batch. Nobody asks for earlier ones.
        DELETE FROM custody.sink_batches WHERE query_id = p_query AND batch_id < p_batch - 100;
    END IF;
    RETURN v_published;
END $$;

-- Wakes those who wait for these topics. Called after the commit: inside the transaction all committers would queue for
-- one lock.
CREATE FUNCTION custody.hint(p_topics int[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('custody', name) FROM custody.topics WHERE topic_id = ANY (p_topics);
END $$;
