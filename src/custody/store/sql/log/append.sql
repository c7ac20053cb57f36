-- Appending to the open segment. Its statements name its table, so they are in a function of its own, and PostgreSQL
-- keeps their plans; dynamic SQL would be planned on each call, and a plan of the parent table would lock all segments.

-- Makes the function `append_<segment_id>`, which lives as long as the segment is open. It appends messages to a
-- partition whose head the caller has locked, and returns the first offset. If another one is expected, it appends
-- nothing.
CREATE FUNCTION custody.make_append(p_segment int) RETURNS void
LANGUAGE plpgsql AS $make$
BEGIN
    EXECUTE format($function$
        CREATE FUNCTION custody.append_%1$s(
            p_topic_id int, p_partition int, p_keys text[], p_kinds "char"[], p_payloads bytea[], p_headers text[],
            p_expected bigint, p_now timestamptz
        ) RETURNS bigint
        LANGUAGE plpgsql AS $$
        DECLARE
            v_next   bigint;
            v_newest timestamptz;
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
            IF cardinality(p_payloads) = 1 THEN
                INSERT INTO custody.log_%1$s (segment_id, partition, "offset", published_at, key, kind, payload,
                                              headers)
                VALUES (%1$s, p_partition, v_next, v_newest, p_keys[1], p_kinds[1], p_payloads[1],
                        p_headers[1]::jsonb);
            ELSE
                INSERT INTO custody.log_%1$s (segment_id, partition, "offset", published_at, key, kind, payload,
                                              headers)
                SELECT %1$s, p_partition, v_next + m.n - 1, v_newest, m.key, m.kind, m.payload, m.headers::jsonb
                FROM unnest(p_keys, p_kinds, p_payloads, p_headers)
                     WITH ORDINALITY m (key, kind, payload, headers, n);
            END IF;
            RETURN v_next;
        END $$
    $function$, p_segment);
END $make$;

-- A migration replaces all functions.
SELECT custody.make_append(segment_id) FROM custody.segments WHERE sealed_at IS NULL;
