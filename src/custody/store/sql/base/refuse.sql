-- How a verb refuses. All of Custody depends on this file, and so does an outbox alone.

-- Every refusal has its stable code as DETAIL, which the client turns into the error of that name. The offsets that it
-- concerns are in the field COLUMN, separated by commas.
CREATE FUNCTION custody.refuse(p_code text, p_message text, p_remedy text DEFAULT NULL, p_offsets bigint[] DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'CY000', MESSAGE = p_message, DETAIL = p_code, HINT = coalesce(p_remedy, ''),
        COLUMN = coalesce(array_to_string(p_offsets, ','), '');
END $$;

-- A verb decides on what it reads after it has its locks. That needs a new snapshot for each statement.
CREATE FUNCTION custody.require_read_committed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM custody.refuse('isolation_level',
            format('Custody''s verbs cannot run in a %s transaction', current_setting('transaction_isolation')),
            'Use READ COMMITTED, PostgreSQL''s default, for the transaction that calls Custody.');
    END IF;
END $$;
