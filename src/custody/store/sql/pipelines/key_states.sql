-- States of keys: read by the tasks of a claim, staged after each message that changed one, and written by the commit.
-- A group has at most one claim in flight, so between the read and the commit only an operator changes a state. Locks:
-- pipeline → states.

-- Refuses a group whose keys can have no state: its messages have no order, or a key is in several partitions.
CREATE FUNCTION custody.require_keyed(p_topic text, p_group text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_group custody.groups := custody.lifecycle_group(p_topic, p_group);
    v_head  custody.heads;
BEGIN
    IF v_group.ordering <> 'key' THEN
        PERFORM custody.refuse('pipeline_refused',
            format('group %L has no order by key, and a state depends on the order of its messages', p_group),
            'Give the pipeline policy=custody.Policy(ordering="key").');
    END IF;
    IF (SELECT t.starvation_limit FROM custody.topics t WHERE t.topic_id = v_group.topic_id) IS NOT NULL THEN
        PERFORM custody.refuse('pipeline_refused',
            format('topic %L has priorities: messages of a key have no order among them, so the key has no state',
                   p_topic),
            'Use a topic without priorities.');
    END IF;
    SELECT h.* INTO v_head FROM custody.heads h
    WHERE h.topic_id = v_group.topic_id AND (custody.position(v_group.group_id, h.partition)).frontier < h.grown_at
    ORDER BY h.partition LIMIT 1;
    IF FOUND THEN
        PERFORM custody.refuse('pipeline_refused',
            format('topic %L has grown, and group %L has yet to get messages of %s/%s from before offset %s: '
                   'their keys may be in two partitions', p_topic, p_group, p_topic, v_head.partition, v_head.grown_at),
            'Start the group at "latest", or let a pipeline copy the messages to a new topic.');
    END IF;
END $$;

-- The states of these keys as of the claim's time, for the messages of one partition. `own`: whether the partition is
-- the one of the key. `changes`: see commit_states. No rows if the claim is not in flight. It is one statement, so that
-- a claim that is seen in flight comes with the states that the claims before it have left.
CREATE FUNCTION custody.states_of_claim(p_group_id int, p_claim bigint, p_partition int, p_keys text[])
RETURNS TABLE (key text, own boolean, state text, changes bigint)
LANGUAGE sql STABLE AS $$
    SELECT k.key, custody.partition_for(k.key, t.partitions) = p_partition, s.state::text, p.state_changes
    FROM custody.pipeline_claims c JOIN custody.pipelines p USING (group_id) JOIN custody.groups g USING (group_id)
    JOIN custody.topics t USING (topic_id)
    CROSS JOIN unnest(p_keys) k (key)
    LEFT JOIN custody.key_states s ON s.group_id = c.group_id AND s.key = k.key
        AND (s.expires_at IS NULL OR s.expires_at > c.claimed_at)
    WHERE c.group_id = p_group_id AND c.claim = p_claim
$$;

CREATE FUNCTION custody.state_stage(p_group_id int, p_claim bigint) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT format('staged_%s_%s_states', p_group_id, p_claim)
$$;

-- Creates the table into which the tasks of a claim write states, if there is none. Returns its name.
CREATE FUNCTION custody.open_state_stage(p_group_id int, p_claim bigint, p_now timestamptz DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_stage text := custody.state_stage(p_group_id, p_claim);
BEGIN
    IF to_regclass('custody.' || quote_ident(v_stage)) IS NOT NULL THEN
        RETURN v_stage;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('custody.stages'), hashtext(v_stage));
    IF NOT EXISTS (SELECT FROM custody.pipeline_claims c WHERE c.group_id = p_group_id AND c.claim = p_claim) THEN
        PERFORM custody.refuse('claim_lost', format('claim %s is no longer in flight', p_claim),
            'Another driver may have taken over.');
    END IF;
    -- A query: to_regclass may still answer from the session's cache, from before the wait.
    IF EXISTS (SELECT FROM pg_class WHERE relnamespace = 'custody'::regnamespace AND relname = v_stage) THEN
        RETURN v_stage;
    END IF;
    INSERT INTO custody.stages VALUES (v_stage, coalesce(p_now, clock_timestamp()))
    ON CONFLICT (name) DO UPDATE SET opened_at = excluded.opened_at;
    EXECUTE format(
        'CREATE UNLOGGED TABLE custody.%I (
             attempt bigint NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL, key text NOT NULL, state json)
             WITH (autovacuum_enabled = off)', v_stage);
    PERFORM custody.grant_as(v_stage, 'custody.suspects');
    RETURN v_stage;
END $$;

-- Writes the states of a claim, within its commit: of each key the newest one that a done message has made. Messages
-- of a key behind one that is not done are not done either (outcome_of_part), so it was made of done messages only.
-- p_states: the attempts that count, how many states each has staged, what each saw of `changes`, and the ttl in
-- seconds. An operator who removes states raises the pipeline's state_changes; what was made of the old ones is then
-- refused, and the batch runs again. p_sets: the done messages of each of p_partitions.
CREATE FUNCTION custody.commit_states(
    p_group custody.groups, p_pipeline custody.pipelines, p_claim custody.pipeline_claims, p_states jsonb,
    p_partitions int[], p_sets int8multirange[], p_now timestamptz
) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = on SET jit = off AS $$
DECLARE
    v_stage    constant text := custody.state_stage((p_group).group_id, (p_claim).claim);
    v_attempts constant bigint[] := ARRAY(SELECT x::bigint FROM jsonb_array_elements_text(p_states -> 'attempts') x);
    v_wanted   constant bigint := (SELECT coalesce(sum(x::bigint), 0)
                                   FROM jsonb_array_elements_text(p_states -> 'counts') x);
    v_found    bigint;
BEGIN
    IF p_states IS NULL THEN
        RETURN;
    ELSIF (p_group).ordering <> 'key' THEN
        PERFORM custody.refuse('pipeline_refused',
            format('group %L has lost its order by key while a keyed pipeline runs', (p_group).name),
            'Give it ordering="key" again, and start the pipeline anew.');
    ELSIF EXISTS (SELECT FROM jsonb_array_elements_text(p_states -> 'changes') x
                  WHERE x::bigint <> (p_pipeline).state_changes) THEN
        PERFORM custody.refuse('stage_lost', format('states of group %L were removed meanwhile', (p_group).name),
            'Run the batch again.');
    ELSIF v_wanted = 0 THEN
        RETURN;
    END IF;
    IF to_regclass('custody.' || quote_ident(v_stage)) IS NOT NULL THEN
        EXECUTE format('SELECT count(*) FROM custody.%I s WHERE s.attempt = ANY ($1)', v_stage)
        INTO v_found USING v_attempts;
    END IF;
    IF v_found IS DISTINCT FROM v_wanted THEN
        PERFORM custody.refuse('stage_lost',
            format('%s of %s staged states are there', coalesce(v_found, 0), v_wanted), 'Run the batch again.');
    END IF;
    EXECUTE format(
        'WITH newest AS MATERIALIZED (
             SELECT DISTINCT ON (s.key COLLATE "C") s.key, s.partition, s."offset", s.state
             FROM custody.%I s JOIN unnest($2, $3) d (partition, offsets)
                 ON d.partition = s.partition AND d.offsets @> s."offset"
             WHERE s.attempt = ANY ($1) ORDER BY s.key COLLATE "C", s."offset" DESC),
         cleared AS (
             DELETE FROM custody.key_states k USING newest n
             WHERE n.state IS NULL AND k.group_id = $4 AND k.key = n.key)
         INSERT INTO custody.key_states AS k
             (group_id, key, state, partition, "offset", claim, updated_at, expires_at)
         SELECT $4, n.key, n.state, n.partition, n."offset", $5, $6, $7 FROM newest n WHERE n.state IS NOT NULL
         ON CONFLICT (group_id, key) DO UPDATE
         SET state = excluded.state, partition = excluded.partition, "offset" = excluded."offset",
             claim = excluded.claim, updated_at = excluded.updated_at, expires_at = excluded.expires_at', v_stage)
    USING v_attempts, p_partitions, p_sets, (p_group).group_id, (p_claim).claim, coalesce(p_now, clock_timestamp()),
          (p_claim).claimed_at + make_interval(secs => (p_states ->> 'ttl')::double precision);
END $$;

-- The states of a group by key: all after p_after, or that of one key. Expired ones are left out.
CREATE FUNCTION custody.key_states(
    p_topic text, p_group text, p_key text DEFAULT NULL, p_after text DEFAULT NULL, p_limit int DEFAULT 1000,
    p_now timestamptz DEFAULT NULL
)
RETURNS TABLE (
    key text, state text, partition int, "offset" bigint, claim bigint, updated_at timestamptz, expires_at timestamptz
)
LANGUAGE sql STABLE AS $$
    SELECT s.key, s.state::text, s.partition, s."offset", s.claim, s.updated_at, s.expires_at
    FROM custody.group_named(p_topic, p_group) g JOIN custody.key_states s USING (group_id)
    WHERE (p_key IS NULL OR s.key = p_key) AND (p_after IS NULL OR s.key > p_after)
      AND (s.expires_at IS NULL OR s.expires_at > coalesce(p_now, clock_timestamp()))
    ORDER BY s.key LIMIT p_limit
$$;

-- Removes the state of a key, or with p_every the states of all keys. Returns how many. A batch that runs meanwhile is
-- run again: it has read them.
CREATE FUNCTION custody.delete_key_states(
    p_topic text, p_group text, p_key text DEFAULT NULL, p_every boolean DEFAULT false
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_group custody.groups := custody.group_named(p_topic, p_group);
    v_gone  bigint;
BEGIN
    PERFORM custody.require_read_committed();
    IF (p_key IS NULL) <> p_every THEN
        PERFORM custody.refuse('invalid_argument', 'either a key is named, or every state is removed');
    END IF;
    UPDATE custody.pipelines p SET state_changes = p.state_changes + 1 WHERE p.group_id = v_group.group_id;
    DELETE FROM custody.key_states s WHERE s.group_id = v_group.group_id AND (p_every OR s.key = p_key);
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END $$;

-- A step of the upkeep: removes some states that have expired, and returns how many. A claim in flight for which they
-- have not expired may still read them. It waits for no lock.
CREATE FUNCTION custody.clear_key_states(p_now timestamptz DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_gone bigint;
BEGIN
    PERFORM custody.require_read_committed();
    DELETE FROM custody.key_states s
    USING (SELECT x.group_id, x.key FROM custody.key_states x
           WHERE x.expires_at <= coalesce(p_now, clock_timestamp())
             AND NOT EXISTS (SELECT FROM custody.pipeline_claims c
                             WHERE c.group_id = x.group_id AND c.claimed_at < x.expires_at)
           ORDER BY x.expires_at LIMIT 1000 FOR UPDATE SKIP LOCKED) gone
    WHERE s.group_id = gone.group_id AND s.key = gone.key;
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END $$;
