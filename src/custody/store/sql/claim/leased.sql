-- The messages of a lease, part by part, each by offset.
CREATE FUNCTION custody.leased_messages(p_group_id int, p_head custody.heads, p_claim_no bigint)
RETURNS TABLE (
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
            SELECT e."offset", e.published_at, e.key, e.kind, e.payload, e.headers, c.attempts, c.first_delivery,
                   c.last_error
            FROM custody.events_in(p_head, v_part.held) e
            JOIN custody.cases c ON c.group_id = p_group_id AND c.partition = v_part.partition
                AND c."offset" = e."offset"
            ORDER BY e."offset";
            CONTINUE;
        END IF;
        FOR v_source IN SELECT * FROM custody.segments_over(p_head, lower(v_part.held), upper(v_part.held)) LOOP
            IF v_part.held = int8multirange(range_merge(v_part.held)) THEN
                RETURN QUERY EXECUTE format(
                    'SELECT "offset", published_at, key, kind, payload, headers, $3, $4, $5
                     FROM %s AND "offset" >= $1 AND "offset" < $2 ORDER BY "offset"', v_source.source)
                USING v_source.from_offset, v_source.until_offset, v_part.attempt, v_part.first_delivery,
                      v_part.last_error;
                CONTINUE;
            END IF;
            RETURN QUERY EXECUTE format(
                'SELECT e.*, $2, $3, $4 FROM unnest($1) r,
                 LATERAL (SELECT "offset", published_at, key, kind, payload, headers FROM %s
                          AND "offset" >= lower(r) AND "offset" < upper(r) ORDER BY "offset") e', v_source.source)
            USING v_part.held * int8multirange(int8range(v_source.from_offset, v_source.until_offset)),
                  v_part.attempt, v_part.first_delivery, v_part.last_error;
        END LOOP;
    END LOOP;
END $$;

-- Gives back what a new lease holds beyond so many bytes of payload, without a charge. Its first message stays. Returns
-- true if there was something. All messages behind the limit are given back, so none stays behind an earlier one of its
-- key.
CREATE FUNCTION custody.give_back_beyond(p_bytes bigint, p_head custody.heads, p_lease_id uuid) RETURNS boolean
LANGUAGE plpgsql SET plan_cache_mode = auto AS $$
DECLARE
    v_parts  custody.leases[];
    v_lease  custody.leases;
    v_beyond int8multirange;
BEGIN
    IF p_bytes IS NULL THEN
        RETURN false;
    END IF;
    SELECT array_agg(l) INTO v_parts FROM custody.leases l WHERE l.lease_id = p_lease_id;
    v_lease := v_parts[1];
    SELECT range_agg(int8range(x."offset", x."offset" + 1)) INTO v_beyond
    FROM (SELECT m."offset", sum(octet_length(m.payload)) OVER (ORDER BY m."offset") - octet_length(m.payload) AS before
          FROM custody.leased_messages(v_lease.group_id, p_head, v_lease.claim_no) m) x
    WHERE x.before >= p_bytes;
    IF v_beyond IS NULL THEN
        RETURN false;
    END IF;
    PERFORM custody.settle_released(g, v_lease.partition, v_parts, v_beyond, v_lease.claimed_at)
    FROM custody.groups g WHERE g.group_id = v_lease.group_id;
    PERFORM custody.shrink_lease(p_lease_id, v_parts, v_beyond, v_lease.claimed_at);
    UPDATE custody.leases l SET size = v_lease.size - custody.cardinality(v_beyond), settled = 0
    WHERE l.lease_id = p_lease_id;
    INSERT INTO custody.journal (at, kind, group_id, partition, lease_id, offsets, worker, detail)
    VALUES (v_lease.claimed_at, 'release', v_lease.group_id, v_lease.partition, p_lease_id, v_beyond, v_lease.worker,
            '{"reason": "bytes"}');
    RETURN true;
END $$;
