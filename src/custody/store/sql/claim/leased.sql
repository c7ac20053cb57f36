-- The messages of a lease, part by part, each by offset: as slices, or each as a row.
CREATE FUNCTION custody.leased_messages(
    p_group_id int, p_head custody.heads, p_claim_no bigint, p_slices boolean DEFAULT false
)
RETURNS TABLE (
    "offset" bigint, published_at timestamptz, key text, kind text, payload bytea, headers jsonb,
    attempt int, first_delivery timestamptz, last_error text, ends int[], keys text[]
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_part custody.leases;
BEGIN
    FOR v_part IN
        SELECT * FROM custody.leases l
        WHERE l.group_id = p_group_id AND l.partition = (p_head).partition AND l.claim_no = p_claim_no ORDER BY l.part
    LOOP
        IF v_part.of_cases THEN
            RETURN QUERY
            SELECT e."offset", e.published_at, e.key, e.kind::text, e.payload, e.headers, c.attempts,
                   c.first_delivery, c.last_error, NULL::int[], NULL::text[]
            FROM custody.events_in(p_head, v_part.held) e
            JOIN custody.cases c ON c.group_id = p_group_id AND c.partition = v_part.partition
                AND c."offset" = e."offset"
            ORDER BY e."offset";
        ELSIF p_slices THEN
            RETURN QUERY
            SELECT s."offset", s.published_at, s.key, s.kind, s.payload, s.headers, v_part.attempt,
                   v_part.first_delivery, v_part.last_error, s.ends, s.keys
            FROM custody.slices_in(p_head, v_part.held) s;
        ELSE
            RETURN QUERY
            SELECT e."offset", e.published_at, e.key, e.kind::text, e.payload, e.headers, v_part.attempt,
                   v_part.first_delivery, v_part.last_error, NULL::int[], NULL::text[]
            FROM custody.events_in(p_head, v_part.held) e;
        END IF;
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
    IF p_bytes > (SELECT sum(octet_length(m.payload))
                  FROM custody.leased_messages(v_lease.group_id, p_head, v_lease.claim_no, true) m)
    THEN
        RETURN false;
    END IF;
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
