-- Redrive and discard of dead letters, by operators. Both take the same filters and have a dry run.

CREATE TYPE custody.dead_filter AS (
    error_like text, key text, partition int, offsets bigint[], died_from timestamptz, died_until timestamptz,
    died_of text, most bigint
);

-- The dead messages that match, without their payloads and headers, because callers collect them.
CREATE FUNCTION custody.dead_matching(p_group custody.groups, p_filter custody.dead_filter) RETURNS SETOF custody.cases
LANGUAGE sql STABLE AS $$
    SELECT c.group_id, c.partition, c."offset", c.key, c.state, c.held, c.attempts, c.failures, c.run_at, c.lease_cap,
           c.first_delivery, c.first_failure, c.last_error, c.last_traceback, c.errors, c.dead_reason, c.worker,
           c.updated_at, c.published_at, c.kind, NULL::bytea, NULL::jsonb
    FROM custody.cases c
    WHERE c.group_id = (p_group).group_id AND c.state = 'dead'
      AND ((p_filter).error_like IS NULL OR c.last_error LIKE (p_filter).error_like)
      AND ((p_filter).key IS NULL OR c.key = (p_filter).key)
      AND ((p_filter).partition IS NULL OR c.partition = (p_filter).partition)
      AND ((p_filter).offsets IS NULL OR c."offset" = ANY ((p_filter).offsets))
      AND ((p_filter).died_from IS NULL OR c.updated_at >= (p_filter).died_from)
      AND ((p_filter).died_until IS NULL OR c.updated_at < (p_filter).died_until)
      AND ((p_filter).died_of IS NULL OR c.dead_reason = (p_filter).died_of)
    ORDER BY c.partition, c."offset"
    LIMIT (p_filter).most
$$;

-- The dead messages that match, under the locks of their cursors: claims depend on what is dead.
CREATE FUNCTION custody.lock_dead(p_group custody.groups, p_filter custody.dead_filter) RETURNS SETOF custody.cases
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM custody.cursors
    WHERE group_id = (p_group).group_id AND (partition = (p_filter).partition OR (p_filter).partition IS NULL)
        ORDER BY partition FOR UPDATE;
    RETURN QUERY SELECT * FROM custody.dead_matching(p_group, p_filter);
END $$;

-- Redrives: dead messages become ready again with all their attempts, and obey the order rule.
CREATE FUNCTION custody.redrive(
    p_topic text, p_group text, p_filter custody.dead_filter DEFAULT NULL, p_dry_run boolean DEFAULT false,
    p_actor text DEFAULT NULL, p_reason text DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (partition int, "offset" bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now   timestamptz;
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_dead  custody.cases[];
BEGIN
    PERFORM custody.require_read_committed();
    IF p_dry_run THEN
        PERFORM custody.require_unmoved(p_topic, v_group,
                                        (SELECT array_agg(d) FROM custody.dead_matching(v_group, p_filter) d));
        RETURN QUERY SELECT d.partition, d."offset" FROM custody.dead_matching(v_group, p_filter) d;
        RETURN;
    END IF;
    SELECT array_agg(d) INTO v_dead FROM custody.lock_dead(v_group, p_filter) d;
    PERFORM custody.require_unmoved(p_topic, v_group, v_dead);
    v_now := coalesce(p_now, clock_timestamp());
    RETURN QUERY
    WITH ready AS (
        UPDATE custody.cases c
        SET state = 'waiting', held = false, attempts = 0, failures = 0, run_at = v_now, lease_cap = NULL,
            dead_reason = NULL, errors = '{}', first_delivery = NULL, first_failure = NULL, updated_at = v_now,
            published_at = NULL, kind = NULL, payload = NULL, headers = NULL
        FROM unnest(v_dead) d
        WHERE c.group_id = d.group_id AND c.partition = d.partition AND c."offset" = d."offset"
        RETURNING c.partition, c."offset"
    ), journalled AS (
        INSERT INTO custody.journal (at, kind, group_id, partition, offsets, worker, error)
        SELECT v_now, 'redrive', v_group.group_id, r.partition, range_agg(int8range(r."offset", r."offset" + 1)),
               p_actor, p_reason
        FROM ready r GROUP BY r.partition
    )
    SELECT r.partition, r."offset" FROM ready r ORDER BY 1, 2;
END $$;

-- Discards: dead messages are done, with a record of who decided it and why.
CREATE FUNCTION custody.discard(
    p_topic text, p_group text, p_filter custody.dead_filter DEFAULT NULL, p_dry_run boolean DEFAULT false,
    p_actor text DEFAULT NULL, p_reason text DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (partition int, "offset" bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now   timestamptz;
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_dead  custody.cases[];
BEGIN
    PERFORM custody.require_read_committed();
    IF p_dry_run THEN
        RETURN QUERY SELECT d.partition, d."offset" FROM custody.dead_matching(v_group, p_filter) d;
        RETURN;
    END IF;
    SELECT array_agg(d) INTO v_dead FROM custody.lock_dead(v_group, p_filter) d;
    v_now := coalesce(p_now, clock_timestamp());
    PERFORM custody.close_dead(v_group, v_dead);
    INSERT INTO custody.journal (at, kind, group_id, partition, offsets, worker, error)
    SELECT v_now, 'discard', v_group.group_id, d.partition, range_agg(int8range(d."offset", d."offset" + 1)), p_actor,
           p_reason
    FROM unnest(v_dead) d GROUP BY d.partition;
    RETURN QUERY SELECT d.partition, d."offset" FROM unnest(v_dead) d ORDER BY 1, 2;
END $$;

-- Closes these dead messages as done, and frees their keys. The caller holds their cursors.
CREATE FUNCTION custody.close_dead(p_group custody.groups, p_dead custody.cases[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM custody.cases c USING unnest(p_dead) d
    WHERE c.group_id = d.group_id AND c.partition = d.partition AND c."offset" = d."offset";
    INSERT INTO custody.freed (group_id, partition, key)
    SELECT DISTINCT d.group_id, d.partition, d.key FROM unnest(p_dead) d WHERE d.held;
    -- A message that was kept only for this dead letter is deleted with it.
    DELETE FROM custody.kept_events k USING unnest(p_dead) d
    WHERE k.topic_id = (p_group).topic_id AND k.partition = d.partition AND k."offset" = d."offset"
      AND NOT EXISTS (SELECT FROM custody.cases c JOIN custody.groups g USING (group_id)
                      WHERE g.topic_id = k.topic_id AND c.partition = k.partition AND c."offset" = k."offset");
END $$;
