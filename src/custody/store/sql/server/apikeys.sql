-- API keys of the HTTP interface. The caller makes the secret, and only its digest is stored.

CREATE FUNCTION custody.create_api_key(
    p_key_id text, p_name text, p_digest bytea, p_produce text[], p_consume text[], p_admin text[],
    p_expires_in interval DEFAULT NULL, p_actor text DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS custody.api_keys
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := coalesce(p_now, clock_timestamp());
    v_key custody.api_keys;
BEGIN
    PERFORM custody.require_read_committed();
    IF p_name IS NULL OR p_name !~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$' THEN
        PERFORM custody.refuse('invalid_argument', format('%L cannot be the name of a key', p_name),
            'Use 1 to 100 letters, digits, dots, dashes and underscores, starting with a letter, digit or underscore.');
    ELSIF cardinality(p_produce || p_consume || p_admin) = 0 THEN
        PERFORM custody.refuse('invalid_argument', 'a key without rights is of no use',
            'Give it the right to produce, consume or admin some topics.');
    END IF;
    INSERT INTO custody.api_keys (key_id, name, digest, produce, consume, admin, created_at, created_by, expires_at)
    VALUES (p_key_id, p_name, p_digest, p_produce, p_consume, p_admin, v_now, p_actor, v_now + p_expires_in)
    ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING
    RETURNING * INTO v_key;
    IF NOT FOUND THEN
        PERFORM custody.refuse('key_exists', format('there is a key %L already', p_name),
            'Choose another name, or revoke that one first.');
    END IF;
    RETURN v_key;
END $$;

-- The keys in use, or all; the newest last.
CREATE FUNCTION custody.list_api_keys(p_revoked boolean DEFAULT false, p_now timestamptz DEFAULT NULL) RETURNS TABLE (
    key_id text, name text, digest bytea, produce text[], consume text[], admin text[], created_at timestamptz,
    created_by text, expires_at timestamptz, revoked_at timestamptz, revoked_by text, active boolean)
LANGUAGE sql STABLE AS $$
    SELECT k.key_id, k.name, k.digest, k.produce, k.consume, k.admin, k.created_at, k.created_by, k.expires_at,
           k.revoked_at, k.revoked_by,
           k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > coalesce(p_now, clock_timestamp()))
    FROM custody.api_keys k WHERE p_revoked OR k.revoked_at IS NULL ORDER BY k.created_at, k.name
$$;

-- Whether there ever was a key: revoked ones stay.
CREATE FUNCTION custody.had_api_keys() RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM custody.api_keys)
$$;

-- Revokes a key. Returns false if it was revoked before.
CREATE FUNCTION custody.revoke_api_key(p_name text, p_actor text DEFAULT NULL, p_now timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM custody.require_read_committed();
    UPDATE custody.api_keys k SET revoked_at = coalesce(p_now, clock_timestamp()), revoked_by = p_actor
    WHERE k.name = p_name AND k.revoked_at IS NULL;
    IF FOUND THEN
        RETURN true;
    END IF;
    IF NOT EXISTS (SELECT FROM custody.api_keys k WHERE k.name = p_name) THEN
        PERFORM custody.refuse('key_not_found', format('there is no key %L', p_name), 'See `custody apikeys list`.');
    END IF;
    RETURN false;
END $$;
