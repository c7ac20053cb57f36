-- The record of a lease. A message that is done has no row in the state of its group, but the journal has an entry for
-- each operation, with its lease. It is read only if something is not found in the lease, so the hot path does not pay
-- for it.

-- The first 60 bits of a lease id are the number of the journal entry of its claim (RFC 9562, version 8); the rest is
-- random. So all entries of a lease are found without an index on it.
CREATE FUNCTION custody.lease_id_of(p_entry bigint) RETURNS uuid
LANGUAGE sql VOLATILE AS $$
    SELECT (lpad(to_hex(p_entry >> 12), 12, '0') || '8' || lpad(to_hex(p_entry & 4095), 3, '0')
            || substr(gen_random_uuid()::text, 20))::uuid
$$;

-- The number of the journal entry in a lease id.
CREATE FUNCTION custody.entry_of(p_lease_id uuid) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT (('x' || substr(p_lease_id::text, 1, 8) || substr(p_lease_id::text, 10, 4)
             || substr(p_lease_id::text, 16, 3))::bit(60))::bigint
$$;

-- The journal entry of the claim that made a lease. No row if the journal does not know it, or no longer.
CREATE FUNCTION custody.claim_of(p_lease_id uuid) RETURNS SETOF custody.journal
LANGUAGE sql STABLE AS $$
    SELECT j.* FROM custody.journal j
    WHERE j.entry = custody.entry_of(p_lease_id) AND j.lease_id = p_lease_id AND j.kind = 'claim'
$$;

CREATE TYPE custody.lease_record AS (
    given   int8multirange,      -- what the claim handed out; null: not known
    kinds   text[],              -- what the holder has settled: each kind of journal entry once,
    settled int8multirange[]     -- and the messages of each
);

-- What the journal has of a lease, besides p_known, whose state the caller knows. It reads the entries of the partition
-- from the claim on, until the last message has left the lease.
CREATE FUNCTION custody.record_of(p_lease_id uuid, p_known int8multirange) RETURNS custody.lease_record
LANGUAGE plpgsql STABLE SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_claim  custody.journal;
    v_entry  record;
    v_open   int8multirange;
    v_nth    int;
    v_record custody.lease_record := ROW(NULL, '{}', '{}');
BEGIN
    SELECT * INTO v_claim FROM custody.claim_of(p_lease_id);
    IF NOT FOUND THEN
        RETURN v_record;
    END IF;
    v_record.given := v_claim.offsets;
    v_open := v_claim.offsets - p_known;
    IF isempty(v_open) THEN
        RETURN v_record;
    END IF;
    FOR v_entry IN
        SELECT coalesce(j.detail ->> 'outcome', j.kind) AS kind, j.offsets * v_claim.offsets AS offsets,
               j.detail ->> 'reason' AS reason, j.lease_id IS NOT NULL AS settled
        FROM custody.journal j
        WHERE j.group_id = v_claim.group_id AND j.partition = v_claim.partition AND j.entry > v_claim.entry
          AND (j.lease_id = p_lease_id AND j.kind <> 'extend' OR j.kind = 'rewind')
        ORDER BY j.group_id, j.partition, j.entry
    LOOP
        IF v_entry.reason = 'bytes' THEN      -- the holder never had them
            v_record.given := v_record.given - v_entry.offsets;
        ELSIF v_entry.settled AND v_entry.kind <> 'expire' AND v_entry.reason IS DISTINCT FROM 'lease_expired' THEN
            v_nth := coalesce(array_position(v_record.kinds, v_entry.kind), cardinality(v_record.kinds) + 1);
            v_record.kinds[v_nth] := v_entry.kind;
            v_record.settled[v_nth] := coalesce(v_record.settled[v_nth], '{}') + v_entry.offsets;
        END IF;
        v_open := v_open - v_entry.offsets;
        EXIT WHEN isempty(v_open);
    END LOOP;
    RETURN v_record;
END $$;

-- The messages of a lease that were settled with this outcome. A nack, too, may have left them dead.
CREATE FUNCTION custody.settled_as(p_record custody.lease_record, p_outcome text) RETURNS int8multirange
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(range_agg(s.offsets), '{}')
    FROM unnest((p_record).kinds, (p_record).settled) s (kind, offsets)
    WHERE s.kind = p_outcome OR s.kind = 'dead' AND p_outcome IN ('nack', 'reject')
$$;

-- What a verb means that names no offsets: every message that the claim handed out and the holder has not settled.
-- p_parts are the rows of the lease. `past` is null if nothing is missing: then the journal was not read.
CREATE FUNCTION custody.meant(
    p_lease_id uuid, p_parts custody.leases[], p_now timestamptz,
    OUT held int8multirange, OUT lost int8multirange, OUT past custody.lease_record
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_counted bigint;
    v_size    int;
BEGIN
    SELECT coalesce(range_agg(l.held) FILTER (WHERE l.deadline > p_now), '{}'),
           sum(l.remaining + l.settled) FILTER (WHERE l.deadline > p_now), min(l.size)
    INTO held, v_counted, v_size FROM unnest(p_parts) l;
    lost := '{}';
    IF v_counted = v_size OR v_size = 0 THEN      -- 0: of a pipeline, whose commit finds what was lost
        RETURN;
    END IF;
    past := custody.record_of(p_lease_id, held);
    IF (past).given IS NOT NULL THEN
        lost := (past).given - held - (SELECT coalesce(range_agg(s), '{}') FROM unnest((past).settled) s);
    ELSIF v_size IS NOT NULL THEN
        PERFORM custody.refuse('lease_lost',
            format('lease %s has lost messages, and the journal does not go back to its claim to say which',
                   p_lease_id),
            'Nothing was changed. Name the offsets.');
    END IF;
END $$;

-- In a transaction a loss refuses everything, because somebody else may publish what follows from these messages.
CREATE FUNCTION custody.refuse_lost(p_lease_id uuid, p_lost int8multirange) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_lost bigint[] := custody.offsets_list(p_lost);
BEGIN
    PERFORM custody.refuse('lease_lost',
        format('lease %s %s', p_lease_id, CASE cardinality(v_lost)
               WHEN 0 THEN 'holds nothing any more'
               WHEN 1 THEN 'does not hold offset ' || v_lost[1]
               ELSE 'does not hold offsets ' || array_to_string(v_lost[:10], ', ')
                   || CASE WHEN cardinality(v_lost) > 10 THEN ' …' ELSE '' END END),
        'Nothing was changed. Somebody else may have the messages now: give up the transaction.', v_lost);
END $$;

-- The topic, group and partition of a lease. No row if it is not known, or no longer.
CREATE FUNCTION custody.lease_place(p_lease_id uuid) RETURNS TABLE (topic text, consumer_group text, partition int)
LANGUAGE sql STABLE AS $$
    SELECT t.name, g.name, l.partition
    FROM (SELECT group_id, partition FROM custody.leases WHERE lease_id = p_lease_id
          UNION ALL
          SELECT group_id, partition FROM custody.claim_of(p_lease_id)) l
    JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
    LIMIT 1
$$;
