-- The journal in parts. The sequence of its entries moves on to the next part, and the old part is dropped as a table.

CREATE FUNCTION custody.part_start(p_part int) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT p_part * 1099511627776 $$;

CREATE FUNCTION custody.part_bytes(p_part int) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(pg_total_relation_size(to_regclass('custody.journal_' || p_part)), 0)
$$;

CREATE FUNCTION custody.set_journal_retention(p_time interval DEFAULT NULL, p_bytes bigint DEFAULT NULL)
RETURNS custody.journal_settings
LANGUAGE plpgsql AS $$
DECLARE
    v_settings custody.journal_settings;
BEGIN
    IF p_time <= '0' OR p_bytes <= 0 THEN
        PERFORM custody.refuse('invalid_argument', 'times and sizes of a retention are positive',
            'Leave out what shall not count.');
    END IF;
    UPDATE custody.journal_settings SET retention_time = p_time, retention_bytes = p_bytes RETURNING * INTO v_settings;
    RETURN v_settings;
END $$;

-- One step for the journal, as custody.maintain does for a topic: opened, sealed, dropped or busy. The topic is null.
CREATE FUNCTION custody.maintain_journal(p_now timestamptz DEFAULT NULL) RETURNS SETOF custody.upkeep
LANGUAGE plpgsql AS $$
DECLARE
    v_now      timestamptz := coalesce(p_now, clock_timestamp());
    v_settings custody.journal_settings;
    v_last     custody.journal_parts;
    v_part     custody.journal_parts;
    v_done     custody.upkeep;
BEGIN
    PERFORM custody.require_read_committed();
    SELECT * INTO v_settings FROM custody.journal_settings;
    IF v_settings.retention_time IS NULL AND v_settings.retention_bytes IS NULL THEN
        RETURN;
    END IF;
    -- One at a time. Whoever comes second does nothing.
    PERFORM 1 FROM custody.journal_settings FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT * INTO v_last FROM custody.journal_parts ORDER BY part DESC LIMIT 1;
    v_done.segment := v_last.part;
    IF (SELECT last_value FROM custody.journal_entries) < custody.part_start(v_last.part) THEN
        v_done.segment := v_last.part - 1;
        v_done.bytes := custody.part_bytes(v_last.part - 1);
        v_done.did := custody.move_on(v_last.part, v_now);
        RETURN NEXT v_done;
        RETURN;
    END IF;
    -- A sequence moves for good, even if the transaction that moved it is rolled back.
    UPDATE custody.journal_parts SET sealed_at = v_now WHERE part < v_last.part AND sealed_at IS NULL;
    v_done.bytes := custody.part_bytes(v_last.part);
    IF (v_settings.retention_bytes IS NOT NULL AND v_done.bytes >= greatest(v_settings.retention_bytes / 10, 1048576)
        OR v_settings.retention_time IS NOT NULL
        AND v_last.created_at <= v_now - greatest(v_settings.retention_time / 10, '1 minute'))
        AND EXISTS (SELECT FROM custody.journal WHERE entry >= custody.part_start(v_last.part))
    THEN
        v_done.did := custody.open_part(v_last.part + 1, v_now);
        RETURN NEXT v_done;
        RETURN;
    END IF;
    SELECT * INTO v_part FROM custody.journal_parts WHERE sealed_at IS NOT NULL ORDER BY part LIMIT 1;
    IF FOUND AND (
            v_part.sealed_at <= v_now - v_settings.retention_time
            OR v_settings.retention_bytes < (SELECT sum(custody.part_bytes(p.part)) FROM custody.journal_parts p))
        -- A circuit breaker counts the entries in its window.
        AND v_part.sealed_at <= v_now
            - coalesce((SELECT max(breaker_window) FROM custody.groups WHERE breaker_rate IS NOT NULL), '0')
    THEN
        v_done.segment := v_part.part;
        v_done.bytes := custody.part_bytes(v_part.part);
        v_done.did := custody.drop_part(v_part);
        RETURN NEXT v_done;
    END IF;
END $$;

-- Attaching does not wait for those who write to the journal or read it.
CREATE FUNCTION custody.open_part(p_part int, p_now timestamptz) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' AS $$
BEGIN
    EXECUTE format('CREATE TABLE custody.journal_%s (LIKE custody.journal INCLUDING DEFAULTS INCLUDING CONSTRAINTS)',
        p_part);
    EXECUTE format('ALTER TABLE custody.journal ATTACH PARTITION custody.journal_%s FOR VALUES FROM (%s) TO (%s)',
                   p_part, custody.part_start(p_part), custody.part_start(p_part + 1));
    INSERT INTO custody.journal_parts (part, created_at) VALUES (p_part, p_now);
    RETURN 'opened';
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
    RETURN 'busy';
END $$;

-- New entries go to a part that was attached in an earlier transaction. A statement that began before that may not know
-- the part and would find no place for its entry. So this happens only when all transactions that had the journal open
-- at the time are over. It only checks, and locks nobody out; if they take long, the next call tries again.
CREATE FUNCTION custody.move_on(p_part int, p_now timestamptz) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_before text[] := ARRAY(SELECT DISTINCT l.virtualtransaction FROM pg_locks l
                             WHERE l.locktype = 'relation' AND l.relation = 'custody.journal'::regclass
                               AND l.pid IS DISTINCT FROM pg_backend_pid()
                               AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()));
BEGIN
    IF (SELECT opened_by FROM custody.journal_parts WHERE part = p_part) = pg_current_xact_id_if_assigned() THEN
        RETURN 'busy';      -- in the transaction that attached it nobody else knows the part yet
    END IF;
    FOR v_try IN 1..20 LOOP
        IF NOT EXISTS (SELECT FROM pg_locks l WHERE l.virtualtransaction = ANY (v_before)
                       AND l.locktype = 'relation' AND l.relation = 'custody.journal'::regclass) THEN
            PERFORM setval('custody.journal_entries', custody.part_start(p_part), false);
            UPDATE custody.journal_parts SET sealed_at = p_now WHERE part = p_part - 1;
            RETURN 'sealed';
        END IF;
        PERFORM pg_sleep(0.01);
    END LOOP;
    RETURN 'busy';
END $$;

-- Everybody writes to the journal, so everybody would wait behind this. It first checks whether somebody holds the
-- journal for long.
CREATE FUNCTION custody.drop_part(p_part custody.journal_parts) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid)
               WHERE l.locktype = 'relation' AND l.relation = 'custody.journal'::regclass AND l.pid <> pg_backend_pid()
                 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                 AND a.xact_start < clock_timestamp() - interval '50 ms') THEN
        RETURN 'busy';
    END IF;
    EXECUTE format('ALTER TABLE custody.journal DETACH PARTITION custody.journal_%s', (p_part).part);
    EXECUTE format('DROP TABLE custody.journal_%s', (p_part).part);
    DELETE FROM custody.journal_parts WHERE part = (p_part).part;
    UPDATE custody.journal_settings SET dropped_until = greatest(dropped_until, (p_part).sealed_at);
    RETURN 'dropped';
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
    RETURN 'busy';
END $$;

CREATE FUNCTION custody.describe_journal()
RETURNS TABLE (part int, created_at timestamptz, sealed_at timestamptz, bytes bigint)
LANGUAGE sql VOLATILE AS $$
    SELECT p.part, p.created_at, p.sealed_at, custody.part_bytes(p.part) FROM custody.journal_parts p ORDER BY p.part
$$;
