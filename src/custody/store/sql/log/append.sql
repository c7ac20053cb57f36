-- Appending to the open segment. Its statements name its table, so they are in a function of its own, and PostgreSQL
-- keeps their plans; dynamic SQL would be planned on each call, and a plan of the parent table would lock all segments.

-- From how many messages on they may become a batch.
CREATE FUNCTION custody.batch_from() RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT 16
$$;

-- Whether messages for one partition go into batches: if there are enough of them, and they are small with their
-- headers, because a batch is not compressed. Malformed ones do not: as rows, the constraints of the table refuse them.
CREATE FUNCTION custody.fit_a_batch(
    p_count int, p_bytes bigint, p_keys text[], p_kinds "char"[], p_headers text[]
) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_count >= custody.batch_from() AND p_bytes < p_count * 1000::bigint
        AND translate(array_to_string(p_kinds, '', '?'), 'jtb', '') = ''
        AND NOT EXISTS (SELECT FROM unnest(p_keys) k WHERE octet_length(k) > 2000)
        AND NOT EXISTS (SELECT FROM unnest(p_headers) h WHERE jsonb_typeof(h::jsonb) <> 'object')
$$;

-- Joins payloads, and says where each ends.
CREATE FUNCTION custody.join_payloads(p_payloads bytea[], OUT joined bytea, OUT ends int[])
LANGUAGE sql IMMUTABLE AS $$
    SELECT string_agg(m.payload, ''), array_agg(m.stop)
    FROM (SELECT p AS payload, sum(octet_length(p)) OVER (ROWS UNBOUNDED PRECEDING)::int AS stop
          FROM unnest(p_payloads) p) m
$$;

CREATE FUNCTION custody.split_payloads(p_joined bytea, p_ends int[]) RETURNS bytea[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT array_agg(substring(p_joined FROM m.start + 1 FOR m.stop - m.start))
    FROM (SELECT e - b.base AS stop, lag(e - b.base, 1, 0) OVER () AS start
          FROM (SELECT p_ends[cardinality(p_ends)] - octet_length(p_joined) AS base) b, unnest(p_ends) e) m
$$;

-- Makes the function `append_<segment_id>`, which lives as long as the segment is open. It appends messages to a
-- partition whose head the caller has locked, and returns the first offset. If another one is expected, it appends
-- nothing. The payloads are an array, or joined.
CREATE FUNCTION custody.make_append(p_segment int) RETURNS void
LANGUAGE plpgsql AS $make$
BEGIN
    EXECUTE format($function$
        CREATE FUNCTION custody.append_%1$s(
            p_topic_id int, p_partition int, p_keys text[], p_kinds "char"[], p_payloads bytea[], p_headers text[],
            p_expected bigint, p_now timestamptz, p_joined bytea DEFAULT NULL, p_ends int[] DEFAULT NULL
        ) RETURNS bigint
        LANGUAGE plpgsql AS $$
        DECLARE
            v_next   bigint;
            v_newest timestamptz;
            v_count  int := CASE WHEN p_ends IS NULL THEN cardinality(p_payloads) ELSE cardinality(p_ends) END;
            v_start  int := 0;
            v_from   int := 1;
            v_until  int;
            v_each   int;
            v_kinds  text;
            v_bytes  bigint;
        BEGIN
            SELECT e."offset" + 1, e.published_at INTO v_next, v_newest FROM custody.log_%1$s e
            WHERE e.partition = p_partition ORDER BY e."offset" DESC LIMIT 1;
            IF NOT FOUND THEN
                SELECT t.next_offset, t.newest INTO v_next, v_newest
                FROM custody.heads h, custody.tail(h) t WHERE h.topic_id = p_topic_id AND h.partition = p_partition;
            END IF;
            IF p_expected <> v_next THEN
                RETURN v_next;
            END IF;
            -- Time never goes back within a partition, even if the clock does.
            v_newest := greatest(coalesce(p_now, clock_timestamp()), v_newest);
            IF v_count = 1 AND p_ends IS NULL THEN
                INSERT INTO custody.log_%1$s (segment_id, partition, "offset", published_at, key, kind, payload,
                                              headers)
                VALUES (%1$s, p_partition, v_next, v_newest, p_keys[1], p_kinds[1], p_payloads[1],
                        p_headers[1]::jsonb);
                RETURN v_next;
            END IF;
            -- A batch that cannot be cut again would stop all who read the partition.
            IF nullif(cardinality(p_keys), 0) <> v_count OR nullif(cardinality(p_headers), 0) <> v_count
                OR cardinality(p_kinds) NOT IN (1, v_count)
            THEN
                PERFORM custody.refuse('invalid_argument', 'there are not as many keys, kinds or headers as payloads',
                    'Give one for each payload, or no keys and no headers at all.');
            ELSIF p_ends IS NOT NULL AND (p_ends[1] < 0 OR p_ends[v_count] IS DISTINCT FROM octet_length(p_joined)
                                          OR p_ends <> ARRAY(SELECT e FROM unnest(p_ends) e ORDER BY e))
            THEN
                PERFORM custody.refuse('invalid_argument', 'the ends are not those of the payloads',
                    'Give the place where each payload ends in p_joined, in order.');
            END IF;
            v_bytes := CASE WHEN p_ends IS NULL THEN pg_column_size(p_payloads) ELSE octet_length(p_joined) END
                + coalesce(pg_column_size(p_headers), 0);
            IF v_count >= custody.batch_from() AND array_position(p_payloads, NULL) IS NULL
                AND custody.fit_a_batch(v_count, v_bytes, p_keys, p_kinds, p_headers)
            THEN
                IF p_ends IS NULL THEN
                    SELECT j.joined, j.ends INTO p_joined, p_ends FROM custody.join_payloads(p_payloads) j;
                    p_keys := CASE WHEN array_remove(p_keys, NULL) <> '{}' THEN p_keys END;
                    p_headers := CASE WHEN array_remove(p_headers, NULL) <> '{}' THEN p_headers END;
                END IF;
                IF p_keys = '{}' THEN
                    p_keys := NULL;
                END IF;
                IF p_headers = '{}' THEN
                    p_headers := NULL;
                END IF;
                IF cardinality(p_kinds) > 1 THEN
                    v_kinds := array_to_string(p_kinds, '');
                    IF v_kinds = repeat(left(v_kinds, 1), v_count) THEN
                        v_kinds := NULL;
                    END IF;
                END IF;
                v_each := ceil(v_count / greatest(ceil(v_count / 1000.0), ceil(v_bytes / 256000.0)));
                IF v_each = v_count THEN
                    INSERT INTO custody.log_%1$s (segment_id, partition, "offset", published_at, kind, n, payloads,
                                                  ends, keys, kinds, headers_each)
                    VALUES (%1$s, p_partition, v_next + v_count - 1, v_newest, p_kinds[1], v_count, p_joined, p_ends,
                            p_keys, v_kinds, p_headers::jsonb[]);
                    RETURN v_next;
                END IF;
                WHILE v_from <= v_count LOOP
                    v_until := least(v_from + v_each - 1, v_count);
                    INSERT INTO custody.log_%1$s (segment_id, partition, "offset", published_at, kind, n, payloads,
                                                  ends, keys, kinds, headers_each)
                    VALUES (%1$s, p_partition, v_next + v_until - 1, v_newest,
                            CASE WHEN v_kinds IS NULL THEN p_kinds[1] ELSE p_kinds[v_from] END, v_until - v_from + 1,
                            substring(p_joined FROM v_start + 1 FOR p_ends[v_until] - v_start),
                            ARRAY(SELECT e - v_start FROM unnest(p_ends[v_from:v_until]) e),
                            p_keys[v_from:v_until], substring(v_kinds FROM v_from FOR v_until - v_from + 1),
                            p_headers[v_from:v_until]::jsonb[]);
                    v_start := p_ends[v_until];
                    v_from := v_until + 1;
                END LOOP;
                RETURN v_next;
            END IF;
            IF p_ends IS NOT NULL THEN
                p_payloads := custody.split_payloads(p_joined, p_ends);
            END IF;
            IF cardinality(p_kinds) = 1 THEN
                p_kinds := array_fill(p_kinds[1], ARRAY[v_count]);
            END IF;
            INSERT INTO custody.log_%1$s (segment_id, partition, "offset", published_at, key, kind, payload, headers)
            SELECT %1$s, p_partition, v_next + m.n - 1, v_newest, m.key, m.kind, m.payload, m.headers::jsonb
            FROM unnest(p_keys, p_kinds, p_payloads, p_headers) WITH ORDINALITY m (key, kind, payload, headers, n);
            RETURN v_next;
        END $$
    $function$, p_segment);
END $make$;

-- Appends messages to a partition whose head the caller has locked, and returns the first offset.
CREATE FUNCTION custody.put_at_head(
    p_head custody.heads, p_keys text[], p_kinds "char"[], p_payloads bytea[], p_headers text[], p_now timestamptz
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_first bigint;
BEGIN
    EXECUTE format('SELECT custody.append_%s($1, $2, $3, $4, $5, $6, $7, $8)', (p_head).segment_id) INTO v_first
    USING (p_head).topic_id, (p_head).partition, p_keys, p_kinds, p_payloads, p_headers, NULL::bigint, p_now;
    RETURN v_first;
END $$;

-- A migration replaces all functions.
SELECT custody.make_append(segment_id) FROM custody.segments WHERE sealed_at IS NULL;
