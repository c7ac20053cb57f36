-- What differs in an outbox alone.

-- No destination is a topic: the relay serves all of them.

CREATE FUNCTION custody.outbox_route(p_destination text, p_key text, OUT topic_id int, OUT partition int)
LANGUAGE sql STABLE AS $$
    SELECT NULL::int, NULL::int
$$;

CREATE FUNCTION custody.outbox_routed(p_destination text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT true
$$;

-- As in base/guard.sql, with the ledger of the outbox.
CREATE FUNCTION custody.require_read_committed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM custody.refuse('isolation_level',
            format('Custody''s verbs cannot run in a %s transaction', current_setting('transaction_isolation')),
            'Use READ COMMITTED, PostgreSQL''s default, for the transaction that calls Custody.');
    ELSIF NOT EXISTS (SELECT FROM custody.outbox_installed WHERE digest = '<digest>') THEN
        PERFORM custody.refuse('schema_changed', 'the schema was migrated while this call waited', 'Try again.');
    END IF;
END $$;
