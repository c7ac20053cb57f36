-- The messages of a lease, part by part, each by offset, as the worker gets them.
CREATE FUNCTION custody.leased_messages(p_group_id int, p_head custody.heads, p_claim_no bigint)
RETURNS TABLE (
    lease_id uuid, partition int, deadline timestamptz, reason text,
    "offset" bigint, published_at timestamptz, key text, kind "char", payload bytea, headers jsonb,
    attempt int, first_delivery timestamptz, last_error text
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_part   custody.leases;
    v_source record;
BEGIN
    FOR v_part IN
        SELECT * FROM custody.leases l
        WHERE l.group_id = p_group_id AND l.partition = (p_head).partition AND l.claim_no = p_claim_no ORDER BY l.part
    LOOP
        IF v_part.of_cases THEN
            RETURN QUERY
            SELECT NULL::uuid, NULL::int, NULL::timestamptz, NULL::text, e."offset", e.published_at, e.key, e.kind, e.payload, e.headers,
                   c.attempts, c.first_delivery, c.last_error
            FROM custody.events_in(p_head, v_part.held) e
            JOIN custody.cases c ON c.group_id = p_group_id AND c.partition = v_part.partition AND c."offset" = e."offset"
            ORDER BY e."offset";
            CONTINUE;
        END IF;
        FOR v_source IN SELECT * FROM custody.segments_over(p_head, lower(v_part.held), upper(v_part.held)) LOOP
            IF v_part.held = int8multirange(range_merge(v_part.held)) THEN
                RETURN QUERY EXECUTE format(
                    'SELECT NULL::uuid, NULL::int, NULL::timestamptz, NULL::text, "offset", published_at, key, kind, payload, headers,
                            $3, $4, $5
                     FROM %s AND "offset" >= $1 AND "offset" < $2 ORDER BY "offset"', v_source.source)
                USING v_source.from_offset, v_source.until_offset, v_part.attempt, v_part.first_delivery, v_part.last_error;
                CONTINUE;
            END IF;
            RETURN QUERY EXECUTE format(
                'SELECT NULL::uuid, NULL::int, NULL::timestamptz, NULL::text, e.*, $2, $3, $4 FROM unnest($1) r,
                 LATERAL (SELECT "offset", published_at, key, kind, payload, headers FROM %s
                          AND "offset" >= lower(r) AND "offset" < upper(r) ORDER BY "offset") e', v_source.source)
            USING v_part.held * int8multirange(int8range(v_source.from_offset, v_source.until_offset)),
                  v_part.attempt, v_part.first_delivery, v_part.last_error;
        END LOOP;
    END LOOP;
END $$;
