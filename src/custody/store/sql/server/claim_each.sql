-- Claims of many callers in one transaction.

-- Claims for several callers, in their order, until there is nothing to give, p_bytes of payload were given, or half a
-- second has passed: the rows of custody.claim for each. A claim that copies dead messages holds the heads of their
-- topic, and nothing is matched under a head: so a bound group with such a topic serves one caller.
-- Of an unordered group one claim is for all callers and is divided among them. In an ordered group the messages of a
-- key must be in one lease, so each caller has a claim.
CREATE FUNCTION custody.claim_each(
    p_topic text, p_group text, p_partition int, p_max int[], p_visibility interval[], p_workers text[],
    p_now timestamptz DEFAULT NULL, p_bytes bigint DEFAULT NULL
) RETURNS TABLE (
    caller int, lease jsonb, "offset" bigint, published_at timestamptz, key text, kind text, payload bytea,
    headers jsonb, attempt int, first_delivery timestamptz, last_error text, ends int[], keys text[]
)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_group   custody.groups;
    v_wanted  int;
    v_row     record;
    v_first   int;
    v_lease   jsonb;                 -- of the claim, before it is divided
    v_ids     uuid[];                -- of each caller
    v_offsets bigint[];              -- of each message
    v_callers int[];
    v_room    int;                   -- how many messages more the caller takes
    v_bytes   bigint := 0;
    v_stop    timestamptz := clock_timestamp() + interval '500 ms';
    i         int := 1;
BEGIN
    IF cardinality(p_max) > 1 THEN
        v_group := custody.lifecycle_group(p_topic, p_group);
    END IF;
    IF cardinality(p_max) = 1 OR v_group.matcher IS NOT NULL AND v_group.dead_letter = 'topic' THEN
        RETURN QUERY
        SELECT 1, c.* FROM custody.claim(p_topic, p_group, p_max[1], p_visibility[1], p_workers[1], p_partition, p_now,
                                         p_bytes, p_slices => true) c;
        RETURN;
    END IF;
    WHILE i <= cardinality(p_max) LOOP
        v_wanted := p_max[i];
        IF v_group.ordering <> 'key' THEN
            SELECT sum(m) INTO v_wanted FROM unnest(p_max[i:]) m;
        END IF;
        v_first := i;
        v_room := NULL;
        v_ids := '{}';
        v_offsets := '{}';
        v_callers := '{}';
        FOR v_row IN
            SELECT c.* FROM custody.claim(p_topic, p_group, v_wanted, p_visibility[i], p_workers[i], p_partition, p_now,
                                          p_bytes, i > 1) c
        LOOP
            IF v_room IS NULL THEN
                v_lease := v_row.lease;
                v_ids[i] := v_lease ->> 'lease_id';
            ELSIF v_room = 0 THEN
                i := i + 1;
                v_ids[i] := custody.lease_id_of(nextval('custody.journal_entries'));
            END IF;
            IF v_room IS NULL OR v_room = 0 THEN
                v_room := p_max[i];
                caller := i;
                lease := v_lease;
                IF i > v_first THEN
                    lease := lease || jsonb_build_object(
                        'lease_id', v_ids[i], 'deadline', (v_lease ->> 'deadline')::timestamptz
                            - coalesce(p_visibility[v_first], v_group.visibility_timeout)
                            + coalesce(p_visibility[i], v_group.visibility_timeout));
                END IF;
                "offset" := NULL;
                payload := NULL;
                RETURN NEXT;
                lease := NULL;
                CONTINUE WHEN v_row."offset" IS NULL;
            END IF;
            "offset" := v_row."offset";
            published_at := v_row.published_at;
            key := v_row.key;
            kind := v_row.kind;
            payload := v_row.payload;
            headers := v_row.headers;
            attempt := v_row.attempt;
            first_delivery := v_row.first_delivery;
            last_error := v_row.last_error;
            RETURN NEXT;
            v_room := v_room - 1;
            v_offsets := v_offsets || "offset";
            v_callers := v_callers || i;
            v_bytes := v_bytes + octet_length(payload);
        END LOOP;
        EXIT WHEN NOT v_lease ? 'lease_id';
        IF v_first < i THEN
            PERFORM custody.divide_lease(v_ids, v_offsets, v_callers, p_workers, p_visibility,
                                         v_group.visibility_timeout);
        END IF;
        EXIT WHEN v_bytes >= p_bytes OR clock_timestamp() >= v_stop;
        i := i + 1;
    END LOOP;
END $$;

-- Divides a new lease: each caller gets the messages that p_callers names beside p_offsets, under its own id, name and
-- deadline, as if it had claimed by itself. The first caller keeps the lease and its entry in the journal.
CREATE FUNCTION custody.divide_lease(
    p_ids uuid[], p_offsets bigint[], p_callers int[], p_workers text[], p_visibility interval[], p_default interval
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    -- Rows of the callers have the same number of a claim. Each caller has parts of its own for what is split later.
    c_apart constant int := 100000;
    v_first constant int := p_callers[1];
    v_parts custody.leases[];
BEGIN
    SELECT array_agg(l ORDER BY l.part) INTO v_parts
    FROM custody.leases l WHERE l.lease_id = p_ids[v_first];
    WITH share AS MATERIALIZED (
        SELECT c.n, range_agg(int8range(c.o, c.o + 1)) AS held, count(*)::int AS size
        FROM unnest(p_offsets, p_callers) c (o, n) GROUP BY c.n
    ), kept AS (
        UPDATE custody.leases l
        SET held = l.held * s.held, remaining = custody.cardinality(l.held * s.held), size = s.size
        FROM share s WHERE s.n = v_first AND l.lease_id = p_ids[v_first] AND l.held && s.held
    ), given AS (
        DELETE FROM custody.leases l USING share s
        WHERE s.n = v_first AND l.lease_id = p_ids[v_first] AND NOT l.held && s.held
    ), divided AS (
        INSERT INTO custody.leases (group_id, partition, claim_no, part, lease_id, held, remaining, of_cases, attempt,
                                    size, deadline, claimed_at, worker, first_delivery, last_error)
        SELECT p.group_id, p.partition, p.claim_no, (s.n - v_first) * c_apart + p.part, p_ids[s.n],
               p.held * s.held, custody.cardinality(p.held * s.held), p.of_cases, p.attempt, s.size,
               p.deadline - coalesce(p_visibility[v_first], p_default) + coalesce(p_visibility[s.n], p_default),
               p.claimed_at, p_workers[s.n], p.first_delivery, p.last_error
        FROM share s JOIN unnest(v_parts) p ON p.held && s.held
        WHERE s.n <> v_first
    ), cases AS (
        UPDATE custody.cases c SET worker = p_workers[s.n]
        FROM unnest(v_parts) p JOIN share s ON p.held && s.held, LATERAL unnest(p.held * s.held) r
        WHERE p.of_cases AND s.n <> v_first AND c.group_id = p.group_id AND c.partition = p.partition
          AND c."offset" >= lower(r) AND c."offset" < upper(r)
    ), first_entry AS (
        UPDATE custody.journal j SET offsets = s.held
        FROM share s WHERE s.n = v_first AND j.entry = custody.entry_of(p_ids[v_first])
    )
    INSERT INTO custody.journal (entry, at, kind, group_id, partition, lease_id, offsets, worker)
    SELECT custody.entry_of(p_ids[s.n]), v_parts[1].claimed_at, 'claim', v_parts[1].group_id, v_parts[1].partition,
           p_ids[s.n], s.held, p_workers[s.n]
    FROM share s WHERE s.n <> v_first ORDER BY s.n;
END $$;
