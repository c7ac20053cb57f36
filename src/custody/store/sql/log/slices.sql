-- Slices of rows. A row of the log is a message or a batch; a slice is the part of it that a reader wants. The
-- statements name the table of a segment, as those that append to it, so they are in functions of their own.

-- A message, or messages of a batch that follow each other. Then `payload` is joined, and `ends` says where each ends,
-- counted from any start: the last one is the end of `payload`. `kind` has a letter for each message, or one for all;
-- `headers` is an array, or null if none has any; so are the keys.
CREATE TYPE custody.slice AS (
    "offset" bigint, published_at timestamptz, key text, kind text, payload bytea, headers jsonb, ends int[],
    keys text[]
);

-- Makes the functions that read a segment: slices_<segment_id> for one range of offsets and for a set, and
-- keys_<segment_id>. They return messages that are rows of their own first, and then those of batches. The batches are
-- found by an index of their own, so that they cost nothing where there are none.
CREATE FUNCTION custody.make_reads(p_segment int) RETURNS void
LANGUAGE plpgsql AS $make$
BEGIN
    EXECUTE format($function$
        CREATE FUNCTION custody.slices_%1$s(p_partition int, p_from bigint, p_until bigint) RETURNS SETOF custody.slice
        LANGUAGE plpgsql STABLE AS $$
        DECLARE
            v_rows bigint;
            v_row  custody.log_%1$s;
            v_low  int;
            v_high int;
            v_cut  int[];
        BEGIN
            SELECT l.* INTO v_row FROM custody.log_%1$s l
            WHERE l.partition = p_partition AND l."offset" >= p_from ORDER BY l."offset" LIMIT 1;
            IF v_row."offset" >= p_until - 1 THEN
                -- Most often all is in one row.
                IF v_row.n = 1 THEN
                    RETURN NEXT ROW(v_row."offset", v_row.published_at, v_row.key, v_row.kind::text, v_row.payload,
                                    v_row.headers, NULL, NULL)::custody.slice;
                    RETURN;
                END IF;
                v_low := greatest(p_from - v_row."offset" + v_row.n, 1);
                v_high := p_until - 1 - v_row."offset" + v_row.n;
                IF v_low > 1 OR v_high < v_row.n THEN
                    v_cut := v_row.ends[greatest(v_low - 1, 1):v_high];
                    IF v_low > 1 THEN
                        v_row.payloads := substring(v_row.payloads FROM v_cut[1] + 1
                                                    FOR v_cut[v_high - v_low + 2] - v_cut[1]);
                        v_row.ends := v_cut[2:];
                    ELSE
                        v_row.payloads := substring(v_row.payloads FROM 1 FOR v_cut[v_high]);
                        v_row.ends := v_cut;
                    END IF;
                    v_row.keys := v_row.keys[v_low:v_high];
                END IF;
                RETURN NEXT ROW(v_row."offset" - v_row.n + v_low, v_row.published_at, NULL,
                                coalesce(substring(v_row.kinds FROM v_low FOR v_high - v_low + 1), v_row.kind::text),
                                v_row.payloads,
                                CASE WHEN v_row.headers_each IS NOT NULL
                                     THEN to_jsonb(v_row.headers_each[v_low:v_high]) END,
                                v_row.ends, v_row.keys)::custody.slice;
                RETURN;
            END IF;
            RETURN QUERY
            SELECT l."offset", l.published_at, l.key, l.kind::text, l.payload, l.headers, l.ends, l.keys
            FROM custody.log_%1$s l
            WHERE l.partition = p_partition AND l."offset" >= p_from AND l."offset" < p_until AND l.n = 1
            ORDER BY l."offset";
            GET DIAGNOSTICS v_rows = ROW_COUNT;
            IF v_rows = p_until - p_from THEN
                RETURN;
            END IF;
            RETURN QUERY
            SELECT s."offset" - s.n + s.low, s.published_at, NULL::text,
                   CASE WHEN s.kinds IS NULL THEN s.kind::text
                        ELSE substring(s.kinds FROM s.low FOR s.high - s.low + 1) END,
                   CASE WHEN s.whole THEN s.payloads
                        WHEN s.low = 1 THEN substring(s.payloads FROM 1 FOR s.cut[s.high])
                        ELSE substring(s.payloads FROM s.cut[1] + 1 FOR s.cut[s.high - s.low + 2] - s.cut[1]) END,
                   CASE WHEN s.headers_each IS NOT NULL THEN to_jsonb(s.headers_each[s.low:s.high]) END,
                   CASE WHEN s.whole OR s.low = 1 THEN s.cut ELSE s.cut[2:] END,
                   CASE WHEN s.whole THEN s.keys ELSE s.keys[s.low:s.high] END
            FROM (SELECT b.*, b.low = 1 AND b.high = b.n AS whole,
                         CASE WHEN b.low = 1 AND b.high = b.n THEN b.ends
                              ELSE b.ends[greatest(b.low - 1, 1):b.high] END AS cut
                  FROM (SELECT l.*, greatest(p_from - l."offset" + l.n, 1)::int AS low,
                               least(p_until - 1 - l."offset" + l.n, l.n)::int AS high
                        FROM custody.log_%1$s l
                        WHERE l.partition = p_partition AND l."offset" >= p_from
                          AND l."offset" <= coalesce((SELECT x."offset" FROM custody.log_%1$s x
                                                      WHERE x.partition = p_partition AND x."offset" >= p_until - 1
                                                      ORDER BY x."offset" LIMIT 1), p_until)
                          AND l.n > 1
                        ORDER BY l."offset") b OFFSET 0) s;
        END $$
    $function$, p_segment);
    EXECUTE format($function$
        CREATE FUNCTION custody.slices_%1$s(p_partition int, p_set int8multirange) RETURNS SETOF custody.slice
        LANGUAGE plpgsql STABLE AS $$
        DECLARE
            v_rows bigint;
        BEGIN
            RETURN QUERY
            SELECT l.* FROM unnest(p_set) r,
                 LATERAL (SELECT e."offset", e.published_at, e.key, e.kind::text, e.payload, e.headers, e.ends, e.keys
                          FROM custody.log_%1$s e
                          WHERE e.partition = p_partition AND e."offset" >= lower(r) AND e."offset" < upper(r)
                            AND e.n = 1
                          ORDER BY e."offset") l;
            GET DIAGNOSTICS v_rows = ROW_COUNT;
            IF v_rows = custody.cardinality(p_set) THEN
                RETURN;
            END IF;
            RETURN QUERY
            SELECT s."offset" - s.n + s.low, s.published_at, NULL::text,
                   CASE WHEN s.kinds IS NULL THEN s.kind::text
                        ELSE substring(s.kinds FROM s.low FOR s.high - s.low + 1) END,
                   CASE WHEN s.whole THEN s.payloads
                        WHEN s.low = 1 THEN substring(s.payloads FROM 1 FOR s.cut[s.high])
                        ELSE substring(s.payloads FROM s.cut[1] + 1 FOR s.cut[s.high - s.low + 2] - s.cut[1]) END,
                   CASE WHEN s.headers_each IS NOT NULL THEN to_jsonb(s.headers_each[s.low:s.high]) END,
                   CASE WHEN s.whole OR s.low = 1 THEN s.cut ELSE s.cut[2:] END,
                   CASE WHEN s.whole THEN s.keys ELSE s.keys[s.low:s.high] END
            FROM unnest(p_set) r, LATERAL (
                 SELECT b.*, b.low = 1 AND b.high = b.n AS whole,
                         CASE WHEN b.low = 1 AND b.high = b.n THEN b.ends
                              ELSE b.ends[greatest(b.low - 1, 1):b.high] END AS cut
                  FROM (SELECT l.*, greatest(lower(r) - l."offset" + l.n, 1)::int AS low,
                               least(upper(r) - 1 - l."offset" + l.n, l.n)::int AS high
                        FROM custody.log_%1$s l
                        WHERE l.partition = p_partition AND l."offset" >= lower(r)
                          AND l."offset" <= coalesce((SELECT x."offset" FROM custody.log_%1$s x
                                                      WHERE x.partition = p_partition AND x."offset" >= upper(r) - 1
                                                      ORDER BY x."offset" LIMIT 1), upper(r))
                          AND l.n > 1
                        ORDER BY l."offset") b OFFSET 0) s;
        END $$
    $function$, p_segment);
    EXECUTE format($function$
        CREATE FUNCTION custody.keys_%1$s(p_partition int, p_set int8multirange, p_keys text[])
        RETURNS TABLE ("offset" bigint, key text)
        LANGUAGE plpgsql STABLE AS $$
        DECLARE
            v_from  constant bigint := lower(p_set);
            v_first bigint;
        BEGIN
            IF p_keys IS NULL THEN
                RETURN QUERY
                SELECT l.* FROM unnest(p_set) r,
                     LATERAL (SELECT e."offset", e.key FROM custody.log_%1$s e
                              WHERE e.partition = p_partition AND e."offset" >= lower(r) AND e."offset" < upper(r)
                                AND e.n = 1
                              ORDER BY e."offset") l;
            ELSE
                RETURN QUERY
                SELECT l.* FROM unnest(p_set) r,
                     LATERAL (SELECT e."offset", e.key FROM custody.log_%1$s e
                              WHERE e.partition = p_partition AND e."offset" >= lower(r) AND e."offset" < upper(r)
                                AND e.n = 1
                              ORDER BY e."offset") l
                WHERE l.key IN (SELECT unnest(p_keys));
            END IF;
            SELECT l."offset" - l.n + 1 INTO v_first FROM custody.log_%1$s l
            WHERE l.partition = p_partition AND l."offset" >= v_from AND l.n > 1 ORDER BY l."offset" LIMIT 1;
            IF v_first IS NULL OR v_first >= upper(p_set) THEN
                RETURN;
            END IF;
            RETURN QUERY
            SELECT s.first + m.i, m.key
            FROM unnest(p_set) r, LATERAL (
                     SELECT b.first + b.low - 2 AS first,
                            CASE WHEN b.keys IS NULL THEN array_fill(NULL::text, ARRAY[b.high - b.low + 1])
                                 WHEN b.low = 1 AND b.high = b.n THEN b.keys ELSE b.keys[b.low:b.high] END AS keys
                     FROM (SELECT l."offset" - l.n + 1 AS first, l.n, l.keys,
                                  greatest(lower(r) - l."offset" + l.n, 1)::int AS low,
                                  least(upper(r) - 1 - l."offset" + l.n, l.n)::int AS high
                           FROM custody.log_%1$s l
                           WHERE l.partition = p_partition AND l."offset" >= lower(r)
                          AND l."offset" <= coalesce((SELECT x."offset" FROM custody.log_%1$s x
                                                      WHERE x.partition = p_partition AND x."offset" >= upper(r) - 1
                                                      ORDER BY x."offset" LIMIT 1), upper(r))
                          AND l.n > 1
                           ORDER BY l."offset") b) s,
                 LATERAL unnest(s.keys) WITH ORDINALITY m (key, i)
            WHERE p_keys IS NULL OR m.key IN (SELECT unnest(p_keys));
        END $$
    $function$, p_segment);
END $make$;

-- Whether a range of a source (see segments_over) has batches.
CREATE FUNCTION custody.has_batches(p_source text, p_partition int, p_from bigint, p_until bigint) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_segment constant text := substring(p_source FROM 'custody\.log_(\d+)');
    v_first   bigint;
BEGIN
    IF v_segment IS NOT NULL THEN
        EXECUTE format('SELECT l."offset" - l.n + 1 FROM custody.log_%s l
                        WHERE l.partition = $1 AND l."offset" >= $2 AND l.n > 1 ORDER BY l."offset" LIMIT 1', v_segment)
        INTO v_first USING p_partition, p_from;
    END IF;
    RETURN coalesce(v_first < p_until, false);
END $$;

-- Dead messages whose segment was dropped are rows of one message.
CREATE FUNCTION custody.kept_slices(p_topic_id int, p_partition int, p_from bigint, p_until bigint)
RETURNS SETOF custody.slice
LANGUAGE sql STABLE AS $$
    SELECT k."offset", k.published_at, k.key, k.kind::text, k.payload, k.headers, NULL::int[], NULL::text[]
    FROM custody.kept_events k
    WHERE k.topic_id = p_topic_id AND k.partition = p_partition AND k."offset" >= p_from AND k."offset" < p_until
    ORDER BY k."offset"
$$;

-- A migration replaces all functions.
SELECT custody.make_reads(segment_id) FROM custody.segments WHERE dropped_at IS NULL;
