-- The state that the handlers of keyed pipelines keep for each key of a group. It is written by the commit of a claim,
-- in the transaction that makes the messages done which it was made of.
CREATE TABLE custody.key_states (
    group_id   int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    key        text NOT NULL,
    state      json NOT NULL CHECK (octet_length(state::text) <= 262144),  -- json, not jsonb: returned as it was given
    partition  int NOT NULL,
    "offset"   bigint NOT NULL,            -- of the message that made it
    claim      bigint NOT NULL,
    updated_at timestamptz NOT NULL,
    expires_at timestamptz,                -- from then on it counts as absent
    PRIMARY KEY (group_id, key)
) WITH (fillfactor = 85);
CREATE INDEX key_states_by_expiry ON custody.key_states (expires_at) WHERE expires_at IS NOT NULL;
