-- Reading the log by offset. The lifecycle knows a message only as (topic, partition, offset, key); the rest is read
-- here.

-- The tables that hold [p_from, p_until) of a partition, and the part of it that each has. Literal table names keep the
-- plan small: a generic plan of the parent table would lock all segments.
CREATE FUNCTION custody.segments_over(p_head custody.heads, p_from bigint, p_until bigint)
RETURNS TABLE (source text, from_offset bigint, until_offset bigint, slices text, slices_of_set text, keys text)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_from >= (p_head).segment_start THEN
        RETURN QUERY SELECT format('custody.log_%s WHERE partition = %s', (p_head).segment_id, (p_head).partition),
            p_from, p_until,
            format('SELECT * FROM custody.slices_%s(%s, $1, $2)', (p_head).segment_id, (p_head).partition),
            format('SELECT * FROM custody.slices_%s(%s, $1)', (p_head).segment_id, (p_head).partition),
            format('SELECT * FROM custody.keys_%s(%s, $1, $2)', (p_head).segment_id, (p_head).partition);
        RETURN;
    END IF;
    RETURN QUERY
    SELECT s.source, greatest(s.first, p_from), least(s.last, p_until), s.slices, s.slices_of_set, s.keys
    FROM (
        SELECT format('custody.kept_events WHERE topic_id = %s AND partition = %s', (p_head).topic_id,
                      (p_head).partition) AS source,
               0::bigint AS first, (p_head).first_offset AS last,
               format('SELECT * FROM custody.kept_slices(%s, %s, $1, $2)', (p_head).topic_id,
                      (p_head).partition) AS slices,
               format('SELECT k.* FROM unnest($1) r, custody.kept_slices(%s, %s, lower(r), upper(r)) k',
                      (p_head).topic_id, (p_head).partition) AS slices_of_set,
               format('SELECT k."offset", k.key FROM unnest($1) r, custody.kept_slices(%s, %s, lower(r), upper(r)) k '
                      'WHERE $2 IS NULL OR k.key = ANY ($2)', (p_head).topic_id, (p_head).partition) AS keys
        UNION ALL
        SELECT format('custody.log_%s WHERE partition = %s', g.segment_id, (p_head).partition), b.first_offset,
               coalesce(lead(b.first_offset) OVER (ORDER BY g.segment_id), 9223372036854775807),
               format('SELECT * FROM custody.slices_%s(%s, $1, $2)', g.segment_id, (p_head).partition),
               format('SELECT * FROM custody.slices_%s(%s, $1)', g.segment_id, (p_head).partition),
               format('SELECT * FROM custody.keys_%s(%s, $1, $2)', g.segment_id, (p_head).partition)
        FROM custody.segments g
        JOIN custody.segment_bounds b ON b.segment_id = g.segment_id AND b.partition = (p_head).partition
        WHERE g.topic_id = (p_head).topic_id AND g.dropped_at IS NULL
    ) s
    WHERE s.first < s.last AND s.first < p_until AND s.last > p_from
    ORDER BY s.first;
END $$;

-- The keys of a set of offsets; only of messages with one of p_keys, unless that is null. ORDER BY keeps the planner
-- from flattening the lateral into a join, which would scan the whole log.
CREATE FUNCTION custody.keys_of(p_head custody.heads, p_set int8multirange, p_keys text[] DEFAULT NULL)
RETURNS TABLE ("offset" bigint, key text)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_source record;
BEGIN
    IF p_set IS NULL OR isempty(p_set) THEN
        RETURN;
    END IF;
    FOR v_source IN SELECT * FROM custody.segments_over(p_head, lower(p_set), upper(p_set)) LOOP
        RETURN QUERY EXECUTE v_source.keys
        USING p_set * int8multirange(int8range(v_source.from_offset, v_source.until_offset)), p_keys;
    END LOOP;
END $$;

CREATE TYPE custody.event AS (
    "offset" bigint, published_at timestamptz, key text, kind "char", payload bytea, headers jsonb
);

-- The slices of a set of offsets.
CREATE FUNCTION custody.slices_in(p_head custody.heads, p_set int8multirange) RETURNS SETOF custody.slice
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_source record;
    v_set    int8multirange;
BEGIN
    FOR v_source IN SELECT * FROM custody.segments_over(p_head, lower(p_set), upper(p_set)) LOOP
        v_set := p_set * int8multirange(int8range(v_source.from_offset, v_source.until_offset));
        IF v_set = int8multirange(range_merge(v_set)) THEN
            RETURN QUERY EXECUTE v_source.slices USING lower(v_set), upper(v_set);
        ELSE
            RETURN QUERY EXECUTE v_source.slices_of_set USING v_set;
        END IF;
    END LOOP;
END $$;

-- The messages of a set of offsets, by offset. Small gaps are read with it, because a batch should be read
-- once. What is stored beside the table is read once for a slice: `||` makes a copy.
CREATE FUNCTION custody.events_in(p_head custody.heads, p_set int8multirange) RETURNS SETOF custody.event
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_read int8multirange := p_set;
    v_some boolean := false;
BEGIN
    IF p_set IS NULL OR isempty(p_set) THEN
        RETURN;
    END IF;
    IF p_set <> int8multirange(range_merge(p_set)) THEN
        SELECT range_agg(int8range(x.first, CASE WHEN x.next <= x.until + 32 THEN x.next ELSE x.until END)) INTO v_read
        FROM (SELECT lower(r) AS first, upper(r) AS until, lead(lower(r)) OVER (ORDER BY r) AS next
              FROM unnest(p_set) r) x;
        v_some := true;
    END IF;
    RETURN QUERY
    SELECT s."offset" + coalesce(m.i, 1) - 1, s.published_at, CASE WHEN s.ends IS NULL THEN s.key ELSE m.key END,
           CASE WHEN s.ends IS NULL OR length(s.kind) = 1 THEN s.kind ELSE substr(s.kind, m.i::int, 1) END::"char",
           CASE WHEN s.ends IS NULL THEN s.payload
                ELSE substring(s.payload FROM m.start - s.base + 1 FOR m.stop - m.start) END,
           CASE WHEN s.ends IS NULL THEN s.headers ELSE nullif(s.headers -> (m.i - 1)::int, 'null') END
    FROM (SELECT x."offset", x.published_at, x.key, x.kind, x.headers, x.keys,
                 substring(x.payload FROM 1) AS payload, CASE WHEN x.ends IS NOT NULL THEN x.ends || '{}' END AS ends,
                 x.ends[cardinality(x.ends)] - octet_length(x.payload) AS base
          FROM custody.slices_in(p_head, v_read) x OFFSET 0) s
    LEFT JOIN LATERAL unnest(CASE WHEN s.ends IS NOT NULL THEN s.base || s.ends END, s.ends, s.keys)
        WITH ORDINALITY m (start, stop, key, i) ON true
    WHERE (s.ends IS NULL OR m.stop IS NOT NULL) AND (NOT v_some OR p_set @> s."offset" + coalesce(m.i, 1) - 1)
    ORDER BY 1;
END $$;

-- Up to p_max messages of a partition from an offset on. With p_bytes they end with the message that reaches so much
-- payload. With p_slices and without p_bytes, messages of a batch come as slices, in no order (see custody.slice).
CREATE FUNCTION custody.read(
    p_topic text, p_partition int, p_from bigint DEFAULT NULL, p_max int DEFAULT 100, p_bytes bigint DEFAULT NULL,
    p_slices boolean DEFAULT false
) RETURNS TABLE (
    "offset" bigint, published_at timestamptz, key text, kind text, payload bytea, headers jsonb, priority text,
    topic_uid uuid, ends int[], keys text[]
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_topic  custody.topics := custody.topic_named(p_topic);
    v_head   custody.heads;
    v_lane   text := CASE WHEN v_topic.starvation_limit IS NOT NULL THEN custody.lane(p_partition) END;
    v_source record;
BEGIN
    PERFORM custody.require_partition(v_topic, p_partition);
    IF p_max IS NULL OR p_max < 1 THEN
        PERFORM custody.refuse('invalid_argument', 'max must be at least 1');
    END IF;
    SELECT * INTO v_head FROM custody.heads h WHERE h.topic_id = v_topic.topic_id AND h.partition = p_partition;
    p_from := least(coalesce(p_from, v_head.first_offset), 4611686018427387904);       -- so that p_max can be added
    IF p_from < v_head.first_offset THEN
        PERFORM custody.refuse('offset_out_of_range',
            format('offset %s of %s/%s is gone: the log starts at %s', p_from, p_topic, p_partition,
                   v_head.first_offset),
            'Start at the first offset, or read older messages from an archive.');
    END IF;
    IF p_bytes IS NULL AND p_slices THEN
        FOR v_source IN SELECT * FROM custody.segments_over(v_head, p_from, p_from + p_max) LOOP
            RETURN QUERY EXECUTE format(
                'SELECT "offset", published_at, key, kind, payload, headers, $3, $4, ends, keys FROM (%s) s',
                v_source.slices)
            USING v_source.from_offset, v_source.until_offset, v_lane, v_topic.uid;
        END LOOP;
        RETURN;
    END IF;
    RETURN QUERY
    SELECT x."offset", x.published_at, x.key, x.kind::text, x.payload, x.headers, v_lane, v_topic.uid, NULL::int[],
           NULL::text[]
    FROM (SELECT e.*, sum(octet_length(e.payload)) OVER (ORDER BY e."offset") - octet_length(e.payload) AS before
          FROM custody.events_in(v_head, int8multirange(int8range(p_from, p_from + p_max))) e) x
    WHERE p_bytes IS NULL OR x.before < p_bytes ORDER BY x."offset";
END $$;

-- The first offset whose message was published at p_time or later, or the end of the log. published_at never decreases
-- within a partition, so the offsets are bisected and no index is needed.
CREATE FUNCTION custody.offset_at(p_head custody.heads, p_time timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_low  bigint := (p_head).first_offset;
    v_high bigint := (custody.tail(p_head)).next_offset;
    v_mid  bigint;
    v_at   timestamptz;
BEGIN
    WHILE v_low < v_high LOOP
        v_mid := (v_low + v_high) / 2;
        SELECT published_at INTO v_at FROM custody.events_in(p_head, int8multirange(int8range(v_mid, v_mid + 1)));
        IF v_at >= p_time THEN
            v_high := v_mid;
        ELSE
            v_low := v_mid + 1;
        END IF;
    END LOOP;
    RETURN v_low;
END $$;

CREATE FUNCTION custody.offset_for_time(p_topic text, p_partition int, p_time timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_head  custody.heads;
BEGIN
    PERFORM custody.require_partition(v_topic, p_partition);
    SELECT * INTO v_head FROM custody.heads WHERE topic_id = v_topic.topic_id AND partition = p_partition;
    RETURN custody.offset_at(v_head, p_time);
END $$;
