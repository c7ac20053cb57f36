-- Blocked keys. An operator frees a key that waits behind its dead message, or skips the message that blocks it.

-- Frees a key: its held dead messages stay dead, but no longer block it. Returns how many there were.
CREATE FUNCTION custody.release_key(
    p_topic text, p_group text, p_key text, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL,
    p_now timestamptz DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now       timestamptz;
    v_group     custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_partition int;
    v_set       int8multirange;
    v_count     bigint := 0;
BEGIN
    PERFORM custody.require_read_committed();
    FOR v_partition IN
        SELECT DISTINCT partition FROM custody.cases
        WHERE group_id = v_group.group_id AND key = p_key AND state = 'dead' AND held ORDER BY 1
    LOOP
        PERFORM 1 FROM custody.cursors WHERE group_id = v_group.group_id AND partition = v_partition FOR UPDATE;
        v_now := coalesce(p_now, clock_timestamp());
        WITH let AS (
            UPDATE custody.cases SET held = false
            WHERE group_id = v_group.group_id AND partition = v_partition AND key = p_key AND state = 'dead' AND held
            RETURNING "offset")
        SELECT range_agg(int8range("offset", "offset" + 1)) INTO v_set FROM let;
        CONTINUE WHEN v_set IS NULL;
        INSERT INTO custody.freed (group_id, partition, key) VALUES (v_group.group_id, v_partition, p_key);
        INSERT INTO custody.journal (at, kind, group_id, partition, offsets, worker, error)
        VALUES (v_now, 'free', v_group.group_id, v_partition, v_set, p_actor, p_reason);
        v_count := v_count + custody.cardinality(v_set);
    END LOOP;
    RETURN v_count;
END $$;

-- Makes messages that wait for a retry due now: all, those of a key, or those whose last error is like a pattern.
-- Returns how many there were. The cursors are locked, because claims look at what is due.
CREATE FUNCTION custody.retry_now(
    p_topic text, p_group text, p_key text DEFAULT NULL, p_where_error text DEFAULT NULL, p_actor text DEFAULT NULL,
    p_reason text DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now   timestamptz;
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_count bigint;
BEGIN
    PERFORM custody.require_read_committed();
    PERFORM 1 FROM custody.cursors WHERE group_id = v_group.group_id ORDER BY partition FOR UPDATE;
    v_now := coalesce(p_now, clock_timestamp());
    WITH due AS (
        UPDATE custody.cases SET run_at = v_now
        WHERE group_id = v_group.group_id AND state = 'waiting' AND run_at > v_now
          AND (p_key IS NULL OR key = p_key) AND (p_where_error IS NULL OR last_error LIKE p_where_error)
        RETURNING partition, "offset"
    ), journalled AS (
        INSERT INTO custody.journal (at, kind, group_id, partition, offsets, worker, error)
        SELECT v_now, 'hasten', v_group.group_id, d.partition, range_agg(int8range(d."offset", d."offset" + 1)),
               p_actor, p_reason
        FROM due d GROUP BY d.partition
    )
    SELECT count(*) INTO v_count FROM due;
    RETURN v_count;
END $$;

-- Skips one message that waits or is dead: it counts as done. Only its worker can settle a message in flight.
CREATE FUNCTION custody.skip(
    p_topic text, p_group text, p_partition int, p_offset bigint, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL,
    p_now timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now   timestamptz;
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_one   int8multirange := int8multirange(int8range(p_offset, p_offset + 1));
    v_at    custody.frontiers;
    v_head  custody.heads;
    v_case  custody.cases;
    v_died  custody.death[];
BEGIN
    PERFORM custody.require_read_committed();
    PERFORM custody.require_partition(custody.topic_named(p_topic), p_partition);
    PERFORM 1 FROM custody.cursors WHERE group_id = v_group.group_id AND partition = p_partition FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM custody.group_named(p_topic, p_group);
    END IF;
    v_now := coalesce(p_now, clock_timestamp());
    v_at := custody.position(v_group.group_id, p_partition);
    SELECT * INTO v_head FROM custody.heads WHERE topic_id = v_group.topic_id AND partition = p_partition;
    v_died := custody.fold_expired(v_group, v_head, v_at.oldest_claim, v_now);
    IF p_offset >= v_at.frontier THEN
        PERFORM custody.refuse('not_skippable',
            format('%s/%s/%s has not been reached yet', p_topic, p_partition, p_offset),
            'Only a message that waits behind its key, for its retry or for an operator can be skipped.');
    ELSIF EXISTS (SELECT FROM custody.leases WHERE group_id = v_group.group_id AND partition = p_partition
                  AND claim_no >= v_at.oldest_claim AND held @> p_offset) THEN
        PERFORM custody.refuse('not_skippable', format('%s/%s/%s is in flight', p_topic, p_partition, p_offset),
            'Wait until its worker has settled it or its lease has expired.');
    END IF;
    SELECT * INTO v_case FROM custody.cases
    WHERE group_id = v_group.group_id AND partition = p_partition AND "offset" = p_offset;
    IF FOUND THEN
        DELETE FROM custody.cases WHERE group_id = v_group.group_id AND partition = p_partition AND "offset" = p_offset;
        IF v_case.key IS NOT NULL AND v_group.ordering = 'key' THEN
            INSERT INTO custody.freed (group_id, partition, key) VALUES (v_group.group_id, p_partition, v_case.key);
        END IF;
    ELSIF EXISTS (SELECT FROM custody.returned
                  WHERE group_id = v_group.group_id AND partition = p_partition AND ranges @> p_offset) THEN
        PERFORM custody.cut_returned(v_group.group_id, p_partition, v_one);
    ELSIF EXISTS (SELECT FROM custody.parked
                  WHERE group_id = v_group.group_id AND partition = p_partition AND ranges @> p_offset) THEN
        PERFORM custody.cut_parked(v_group.group_id, p_partition, v_one);
    ELSE
        PERFORM custody.refuse('not_skippable', format('%s/%s/%s is done already', p_topic, p_partition, p_offset),
            'There is nothing to do.');
    END IF;
    INSERT INTO custody.journal (at, kind, group_id, partition, offsets, worker, error)
    VALUES (v_now, 'skip', v_group.group_id, p_partition, v_one, p_actor, p_reason);
    IF v_died IS NOT NULL THEN
        PERFORM custody.copy_dead(v_group, v_died, p_now);
    END IF;
END $$;
