-- What every verb calls first.

-- A verb decides on what it reads after it has its locks. That needs a new snapshot for each statement.
-- Reading the ledger locks it until the transaction ends. A migration locks it against that before it replaces the
-- functions: it waits for the verbs that run, and those that come later wait here. They belong to the older functions,
-- and must not go on with the newer ones. The name of this function in the database has the digest of the functions, so
-- that a verb of other functions does not find it.
CREATE FUNCTION custody.require_read_committed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM custody.refuse('isolation_level',
            format('Custody''s verbs cannot run in a %s transaction', current_setting('transaction_isolation')),
            'Use READ COMMITTED, PostgreSQL''s default, for the transaction that calls Custody.');
    ELSIF NOT EXISTS (SELECT FROM custody.release WHERE digest = '<digest>') THEN
        PERFORM custody.refuse('schema_changed', 'the schema was migrated while this call waited', 'Try again.');
    END IF;
END $$;
