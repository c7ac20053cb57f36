-- Transactions of producers: what they are to publish and acknowledge waits here, where nobody sees it, until the commit.
CREATE TABLE custody.transactions (
    transaction_id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    producer_id    text NOT NULL REFERENCES custody.producers ON DELETE CASCADE,
    epoch          int NOT NULL,
    state          text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'committed', 'aborted')),
    begun_at       timestamptz NOT NULL,
    expires_at     timestamptz NOT NULL,
    ended_at       timestamptz CHECK ((ended_at IS NULL) = (state = 'open')),
    reason         text,
    -- what the commit returned, in the order in which it was added: a repeat returns the same
    topics         text[],
    partitions     int[],
    offsets        bigint[],           -- the delay id of a delayed message
    deliver_at     timestamptz[]
);
CREATE INDEX transactions_open ON custody.transactions (expires_at) WHERE state = 'open';
CREATE INDEX transactions_ended ON custody.transactions (ended_at) WHERE state <> 'open';

CREATE TABLE custody.transaction_messages (
    transaction_id uuid NOT NULL REFERENCES custody.transactions ON DELETE CASCADE,
    n              int NOT NULL,
    topic_id       int NOT NULL,       -- no reference: with a topic that was deleted the transaction fails, not a part of it
    partition      int NOT NULL,
    placed_of      int,                -- among so many partitions it was placed by its key or by chance; null: it was named
    key            text,
    kind           "char" NOT NULL,
    payload        bytea NOT NULL,
    headers        jsonb,
    deliver_at     timestamptz,
    delay          interval,           -- from the commit on
    CHECK (deliver_at IS NULL OR delay IS NULL),
    CONSTRAINT message_form CHECK (kind IN ('j', 't', 'b') AND jsonb_typeof(headers) = 'object'),
    PRIMARY KEY (transaction_id, n)
);

CREATE TABLE custody.transaction_acks (
    transaction_id uuid NOT NULL REFERENCES custody.transactions ON DELETE CASCADE,
    lease_id       uuid NOT NULL,
    offsets        int8multirange NOT NULL,
    PRIMARY KEY (transaction_id, lease_id)
);
