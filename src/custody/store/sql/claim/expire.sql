-- Expiry is a rule, not a process: a lease past its deadline is expired for every reader. The next claim folds it.

-- Folds expired leases: their messages become returned ranges and due cases. The caller holds the cursor.
-- A lease that somebody has locked (an ack in an open transaction) counts as live: waiting for it would stall the
-- partition. Only a message that was leased alone is charged. Messages that were leased together come back in leases a
-- tenth the size. The lease of a pipeline (size 0) charges no message and comes back whole: the tasks find out which
-- message ends their process. While the breaker is open no message is charged, and a probe that expires is put off, so
-- that the next probe is another message.
-- Returns the deaths to be copied (see dead_letter.sql), or null. Without p_copied a lease that may cause one counts as
-- live, too.
CREATE FUNCTION custody.fold_expired(
    p_group custody.groups, p_head custody.heads, p_oldest bigint, p_now timestamptz, p_copied boolean DEFAULT true
) RETURNS custody.death[]
LANGUAGE plpgsql SET plan_cache_mode = auto AS $$
DECLARE
    v_gone     record;
    v_failures custody.failure[];
    v_dead     bigint[];
    v_died     custody.death[];
    v_open     boolean := (p_group).breaker_state <> 'closed';
    v_again_at timestamptz := p_now + CASE WHEN v_open THEN (p_group).breaker_probe ELSE '0' END;
BEGIN
    FOR v_gone IN
        WITH locked AS (
            SELECT claim_no, part FROM custody.leases
            WHERE group_id = (p_group).group_id AND partition = (p_head).partition AND claim_no >= p_oldest
              AND deadline <= p_now
              AND (p_copied OR size <> 1 OR (p_group).dead_letter <> 'topic')
            FOR UPDATE SKIP LOCKED
        ), gone AS (
            DELETE FROM custody.leases l USING locked k
            WHERE l.group_id = (p_group).group_id AND l.partition = (p_head).partition
              AND l.claim_no = k.claim_no AND l.part = k.part
            RETURNING l.*
        )
        SELECT lease_id, of_cases, attempt, size, worker, last_error,
               coalesce(first_delivery, claimed_at) AS first_delivery, range_agg(held) AS held
        FROM gone
        GROUP BY claim_no, lease_id, of_cases, attempt, size, worker, last_error, coalesce(first_delivery, claimed_at)
        ORDER BY claim_no
    LOOP
        IF v_gone.size = 1 AND NOT v_open THEN
            SELECT array_agg(ROW(k."offset", k.key, v_gone.attempt, v_gone.first_delivery, 'lease expired', NULL,
                                 '0 s', NULL)::custody.failure)
            INTO v_failures
            FROM custody.keys_of(p_head, v_gone.held) k;
            v_dead := custody.charge(p_group, p_head, v_failures, 'lease_expired', 1, v_gone.worker,
                                     v_gone.lease_id, p_now);
            IF cardinality(v_dead) > 0 AND (p_group).dead_letter = 'topic' THEN
                v_died := v_died || custody.deaths(p_group, (p_head).partition, v_dead);
            END IF;
            -- A message that died is journalled as dead only: it was never ready in between.
            CONTINUE WHEN cardinality(v_dead) > 0;
        ELSIF v_gone.of_cases THEN
            UPDATE custody.cases c
            SET state = 'waiting', run_at = CASE WHEN v_gone.size = 1 THEN v_again_at ELSE p_now END,
                updated_at = p_now, lease_cap = CASE WHEN v_gone.size > 0 THEN greatest(1, v_gone.size / 10) END,
                last_error = coalesce(c.last_error, 'lease expired')
            FROM unnest(v_gone.held) r
            WHERE c.group_id = (p_group).group_id AND c.partition = (p_head).partition
              AND c."offset" >= lower(r) AND c."offset" < upper(r);
        ELSIF v_gone.size = 1 THEN
            INSERT INTO custody.cases (group_id, partition, "offset", key, state, attempts, failures, run_at, lease_cap,
                                       first_delivery, last_error, worker, updated_at)
            SELECT (p_group).group_id, (p_head).partition, k."offset", k.key, 'waiting', v_gone.attempt, 0, v_again_at,
                   1, v_gone.first_delivery, 'lease expired', v_gone.worker, p_now
            FROM custody.keys_of(p_head, v_gone.held) k;
        ELSE
            INSERT INTO custody.returned (group_id, partition, ranges, attempts, chunk, first_delivery, last_error,
                                          returned_at)
            VALUES ((p_group).group_id, (p_head).partition, v_gone.held, v_gone.attempt,
                    CASE WHEN v_gone.size > 0 THEN greatest(1, v_gone.size / 10) END, v_gone.first_delivery,
                    'lease expired', p_now);
        END IF;
        INSERT INTO custody.journal (at, kind, group_id, partition, lease_id, offsets, worker, error, detail)
        VALUES (p_now, 'expire', (p_group).group_id, (p_head).partition, v_gone.lease_id, v_gone.held, v_gone.worker,
                'lease expired', jsonb_build_object('charged', v_gone.size = 1 AND NOT v_open));
    END LOOP;
    RETURN v_died;
END $$;
