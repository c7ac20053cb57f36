-- Rewind: done messages become ready again, from an offset or a time on.

-- Leases lose the range (their acks are lost), its cases are closed, and [target, frontier) comes back with attempt 0.
-- Without p_partition all partitions are rewound. Returns how many messages came back, for each partition. A dry run
-- locks nothing and returns what a rewind would do now.
-- It holds the cursors, so nobody can claim meanwhile. Therefore it waits only p_wait for a lock. If an open
-- transaction holds a lease for longer, the answer is `busy` and names the transaction; the caller may try again.
CREATE FUNCTION custody.rewind(
    p_topic text, p_group text, p_to_offset bigint DEFAULT NULL, p_to_time timestamptz DEFAULT NULL,
    p_partition int DEFAULT NULL, p_dry_run boolean DEFAULT false, p_actor text DEFAULT NULL,
    p_reason text DEFAULT NULL, p_now timestamptz DEFAULT NULL,
    p_wait interval DEFAULT '100 ms'
) RETURNS TABLE (partition int, target bigint, messages bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET lock_timeout = '100ms' AS $$
DECLARE
    v_now    timestamptz;
    v_topic  custody.topics;
    v_group  custody.groups;
    v_head   custody.heads;
    v_at     custody.frontiers;
    v_target bigint;
    v_back   int8multirange;
BEGIN
    PERFORM custody.require_read_committed();
    IF (p_to_offset IS NULL) = (p_to_time IS NULL) THEN
        PERFORM custody.refuse('invalid_argument', 'a rewind needs either an offset or a time');
    END IF;
    -- It holds until the end of the function.
    PERFORM set_config('lock_timeout', round(1000 * extract(epoch FROM p_wait)) || 'ms', true);
    -- Retention takes this lock too: messages that come back are still in the log.
    v_topic := CASE WHEN p_dry_run THEN custody.topic_named(p_topic) ELSE custody.lock_topic(p_topic) END;
    v_group := custody.lifecycle_group(p_topic, p_group);
    IF p_partition IS NOT NULL THEN
        PERFORM custody.require_partition(v_topic, p_partition);
    END IF;
    IF NOT p_dry_run THEN
        PERFORM custody.lock_for_rewind(v_topic, v_group, p_partition, p_to_offset, p_to_time);
    END IF;
    v_now := coalesce(p_now, clock_timestamp());
    FOR v_head IN
        SELECT * FROM custody.heads h
        WHERE h.topic_id = v_topic.topic_id AND (h.partition = p_partition OR p_partition IS NULL)
        ORDER BY h.partition
    LOOP
        v_at := custody.position(v_group.group_id, v_head.partition);
        v_target := coalesce(p_to_offset, custody.offset_at(v_head, p_to_time));
        IF v_target < v_head.first_offset OR p_to_offset > v_at.frontier AND p_partition IS NOT NULL THEN
            PERFORM custody.refuse('offset_out_of_range',
                format('%s/%s cannot be rewound to %s: the group has been handed %s to %s', p_topic, v_head.partition,
                       v_target, v_head.first_offset, v_at.frontier),
                'Choose an offset in that range. A rewind goes back, never forward.');
        END IF;
        v_target := least(v_target, v_at.frontier);
        PERFORM custody.require_unmoved_from(p_topic, v_group, v_head, v_target, v_at.frontier);
        partition := v_head.partition;
        target := v_target;
        messages := v_at.frontier - v_target;
        IF messages > 0 AND NOT p_dry_run THEN
            v_back := int8multirange(int8range(v_target, v_at.frontier));
            DELETE FROM custody.leases l
                WHERE l.group_id = v_group.group_id AND l.partition = v_head.partition
                  AND l.claim_no >= v_at.oldest_claim AND l.held <@ v_back;
            UPDATE custody.leases l SET held = l.held - v_back, remaining = custody.cardinality(l.held - v_back)
                WHERE l.group_id = v_group.group_id AND l.partition = v_head.partition
                  AND l.claim_no >= v_at.oldest_claim AND l.held && v_back;
            DELETE FROM custody.cases c
            WHERE c.group_id = v_group.group_id AND c.partition = v_head.partition AND c."offset" >= v_target;
            PERFORM custody.cut_parked(v_group.group_id, v_head.partition, v_back);
            PERFORM custody.cut_returned(v_group.group_id, v_head.partition, v_back);
            INSERT INTO custody.returned (group_id, partition, ranges, attempts, rewound, returned_at)
            VALUES (v_group.group_id, v_head.partition, v_back, 0, true, v_now);
            INSERT INTO custody.journal (at, kind, group_id, partition, offsets, worker, error)
            VALUES (v_now, 'rewind', v_group.group_id, v_head.partition, v_back, p_actor, p_reason);
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;

-- Locks the cursors and the leases that lose messages by the rewind. Refuses if somebody holds one of them for long.
CREATE FUNCTION custody.lock_for_rewind(
    p_topic custody.topics, p_group custody.groups, p_partition int, p_to_offset bigint, p_to_time timestamptz
)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_head   custody.heads;
    v_at     custody.frontiers;
    v_target bigint;
    v_locked custody.leases[];
    v_by     record;
BEGIN
    PERFORM 1 FROM custody.cursors c
    WHERE c.group_id = (p_group).group_id AND (c.partition = p_partition OR p_partition IS NULL)
        ORDER BY c.partition FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM custody.group_named((p_topic).name, (p_group).name);
    END IF;
    FOR v_head IN
        SELECT * FROM custody.heads h
        WHERE h.topic_id = (p_topic).topic_id AND (h.partition = p_partition OR p_partition IS NULL)
        ORDER BY h.partition
    LOOP
        v_at := custody.position((p_group).group_id, v_head.partition);
        v_target := coalesce(p_to_offset, custody.offset_at(v_head, p_to_time));
        -- Whoever held a row before may have settled a part of it, or split it: look again until nothing has changed.
        LOOP
            SELECT array_agg(x.l) INTO v_locked
            FROM (SELECT l FROM custody.leases l
                  WHERE l.group_id = (p_group).group_id AND l.partition = v_head.partition
                    AND l.claim_no >= v_at.oldest_claim
                    AND upper(l.held) > v_target
                  ORDER BY l.claim_no, l.part FOR UPDATE) x;
            EXIT WHEN v_locked IS NOT DISTINCT FROM (
                SELECT array_agg(l ORDER BY l.claim_no, l.part) FROM custody.leases l
                WHERE l.group_id = (p_group).group_id AND l.partition = v_head.partition
                  AND l.claim_no >= v_at.oldest_claim
                  AND upper(l.held) > v_target);
        END LOOP;
    END LOOP;
EXCEPTION WHEN lock_not_available THEN
    SELECT l.lease_id, l.partition, l.worker, k.pid INTO v_by
    FROM custody.leases l JOIN pg_locks k ON k.locktype = 'transactionid' AND k.granted AND k.transactionid = l.xmax
    WHERE l.group_id = (p_group).group_id AND (l.partition = p_partition OR p_partition IS NULL)
      AND k.pid <> pg_backend_pid() LIMIT 1;
    PERFORM custody.refuse('busy',
        CASE WHEN v_by.pid IS NULL THEN format('somebody claims or settles messages of group %L just now',
                                               (p_group).name)
             ELSE format('an open transaction (process %s of the database) has locked lease %s of partition %s%s',
                         v_by.pid, v_by.lease_id, v_by.partition, coalesce(format(', worker %L', v_by.worker), '')) END,
        'Nothing was changed. Try again when it has ended.');
END $$;

-- Takes offsets out of the parked runs of a partition. The caller holds the cursor.
CREATE FUNCTION custody.cut_parked(p_group_id int, p_partition int, p_set int8multirange) RETURNS void
LANGUAGE sql AS $$
    WITH cut AS (
        DELETE FROM custody.parked WHERE group_id = p_group_id AND partition = p_partition AND ranges && p_set
        RETURNING *)
    INSERT INTO custody.parked
    SELECT group_id, partition, key, lower(ranges - p_set), ranges - p_set, custody.cardinality(ranges - p_set),
           parked_at
    FROM cut WHERE NOT ranges <@ p_set
$$;

CREATE FUNCTION custody.cut_returned(p_group_id int, p_partition int, p_set int8multirange) RETURNS void
LANGUAGE sql AS $$
    DELETE FROM custody.returned WHERE group_id = p_group_id AND partition = p_partition AND ranges <@ p_set;
    UPDATE custody.returned SET ranges = ranges - p_set
    WHERE group_id = p_group_id AND partition = p_partition AND ranges && p_set
$$;
