-- If the topic allows it, retention passes unresolved messages: they are done, and the journal names retention as the
-- cause. Dead letters are kept as always, held ones too. Messages in flight are not touched: their lease holds the
-- segment.

-- Folds expired leases within a segment, so that only live leases hold it. The caller holds cursors and heads.
CREATE FUNCTION custody.fold_segment(p_segment custody.segments, p_now timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_at   record;
    v_died custody.death[];
BEGIN
    FOR v_at IN
        SELECT g, h, f.oldest_claim FROM custody.groups g JOIN custody.heads h USING (topic_id)
        CROSS JOIN LATERAL custody.position(g.group_id, h.partition) f
        WHERE g.topic_id = (p_segment).topic_id AND NOT g.bare ORDER BY g.group_id, h.partition
    LOOP
        v_died := custody.fold_expired(v_at.g, v_at.h, v_at.oldest_claim, p_now);
        IF v_died IS NOT NULL THEN
            PERFORM custody.copy_dead(v_at.g, v_died, p_now);
        END IF;
    END LOOP;
END $$;

-- Resolves everything that any group has open in a segment, except dead letters. Returns the number of deliveries that
-- were given up.
CREATE FUNCTION custody.pass_segment(p_segment custody.segments, p_now timestamptz) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_at    record;
    v_reach int8multirange;
    v_lost  int8multirange;
    v_all   bigint := 0;
BEGIN
    FOR v_at IN
        SELECT g.group_id, g.ordering, h.partition, h.first_offset,
               custody.segment_end(p_segment, h.partition) AS until, f.frontier, f.claim_no, f.oldest_claim
        FROM custody.groups g JOIN custody.heads h USING (topic_id)
        CROSS JOIN LATERAL custody.position(g.group_id, h.partition) f
        WHERE g.topic_id = (p_segment).topic_id ORDER BY g.group_id, h.partition
    LOOP
        CONTINUE WHEN v_at.first_offset >= v_at.until;
        v_reach := int8multirange(int8range(v_at.first_offset, v_at.until));
        WITH closed AS (
            DELETE FROM custody.cases c
            WHERE c.group_id = v_at.group_id AND c.partition = v_at.partition AND c."offset" >= v_at.first_offset
              AND c."offset" < v_at.until
              AND c.state <> 'dead'
            RETURNING c."offset", c.key
        ), freed AS (
            INSERT INTO custody.freed (group_id, partition, key)
            SELECT DISTINCT v_at.group_id, v_at.partition, x.key FROM closed x
            WHERE x.key IS NOT NULL AND v_at.ordering = 'key'
        )
        SELECT coalesce(range_agg(int8range(x."offset", x."offset" + 1)), '{}') INTO v_lost FROM closed x;
        SELECT v_lost + coalesce(range_agg(x.s * v_reach), '{}') INTO v_lost
        FROM (SELECT r.ranges FROM custody.returned r WHERE r.group_id = v_at.group_id AND r.partition = v_at.partition
              UNION ALL
              SELECT p.ranges FROM custody.parked p
              WHERE p.group_id = v_at.group_id AND p.partition = v_at.partition) x (s);
        PERFORM custody.cut_returned(v_at.group_id, v_at.partition, v_reach);
        PERFORM custody.cut_parked(v_at.group_id, v_at.partition, v_reach);
        IF v_at.frontier < v_at.until THEN
            v_lost := v_lost + int8multirange(int8range(v_at.frontier, v_at.until));
            INSERT INTO custody.frontiers
            VALUES (v_at.group_id, v_at.partition, v_at.claim_no + 1, v_at.until, v_at.oldest_claim);
            DELETE FROM custody.frontiers
            WHERE group_id = v_at.group_id AND partition = v_at.partition AND claim_no = v_at.claim_no;
        END IF;
        CONTINUE WHEN isempty(v_lost);
        INSERT INTO custody.journal (at, kind, group_id, partition, offsets, error)
        VALUES (p_now, 'drop', v_at.group_id, v_at.partition, v_lost, 'dropped by retention');
        v_all := v_all + custody.cardinality(v_lost);
    END LOOP;
    RETURN v_all;
END $$;
