-- Keys of programs that call a server. Only the digest of a key is stored: whoever reads this table, or a backup of it,
-- can use none of them. Revoked keys stay, as a record.

CREATE TABLE custody.api_keys (
    key_id     text PRIMARY KEY CHECK (key_id ~ '^[a-z0-9]{12}$'),
    name       text NOT NULL CHECK (name ~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$'),
    digest     bytea NOT NULL CHECK (octet_length(digest) = 32),
    produce    text[] NOT NULL,            -- the topics on which the key may do so
    consume    text[] NOT NULL,
    admin      text[] NOT NULL,
    created_at timestamptz NOT NULL,
    created_by text,
    expires_at timestamptz CHECK (expires_at > created_at),
    revoked_at timestamptz,
    revoked_by text,
    CHECK (cardinality(produce) + cardinality(consume) + cardinality(admin) > 0)
);
-- The name of a revoked key can be given again: so a key is replaced by one of the same name.
CREATE UNIQUE INDEX api_keys_in_use ON custody.api_keys (name) WHERE revoked_at IS NULL;
