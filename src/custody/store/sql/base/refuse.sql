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
