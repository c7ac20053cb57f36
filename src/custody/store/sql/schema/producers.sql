-- Idempotent producers, and their transactions.

CREATE TABLE custody.producers (
    producer_id   text PRIMARY KEY CHECK (producer_id <> ''),
    epoch         int NOT NULL CHECK (epoch >= 1),
    last_sequence bigint NOT NULL DEFAULT -1,
    updated_at    timestamptz NOT NULL
);

-- What the last publishes of a producer returned, so that a repeat returns the same.
CREATE TABLE custody.producer_receipts (
    producer_id    text NOT NULL REFERENCES custody.producers ON DELETE CASCADE,
    epoch          int NOT NULL,
    first_sequence bigint NOT NULL,
    last_sequence  bigint NOT NULL,
    topic_id       int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    partitions     int[] NOT NULL,
    offsets        bigint[] NOT NULL,      -- delay ids, if the messages are delayed
    deliver_at     timestamptz[],          -- null, if they are not
    PRIMARY KEY (producer_id, epoch, last_sequence),
    CHECK (cardinality(partitions) = last_sequence - first_sequence + 1),
    CHECK (cardinality(offsets) = cardinality(partitions)),
    CHECK (cardinality(deliver_at) = cardinality(partitions))
);

-- The highest epoch of forgotten producers, so that a producer that comes back still fences its old instances. A row
-- for each would grow without end: producers share 256 rows, by the first byte of the hash of their names.
CREATE TABLE custody.forgotten_producers (
    bucket  int PRIMARY KEY,
    highest int NOT NULL
);

-- A transaction keeps its messages and acks here, where no consumer sees them, until it commits.
CREATE TABLE custody.transactions (
    transaction_id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    producer_id    text NOT NULL REFERENCES custody.producers ON DELETE CASCADE,
    epoch          int NOT NULL,
    state          text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'committed', 'aborted')),
    begun_at       timestamptz NOT NULL,
    expires_at     timestamptz NOT NULL,
    ended_at       timestamptz CHECK ((ended_at IS NULL) = (state = 'open')),
    reason         text,
    -- What the commit returned, in the order in which the messages were added: a repeat returns the same.
    topics         text[],
    partitions     int[],
    offsets        bigint[],               -- the delay id of a delayed message
    deliver_at     timestamptz[]
);
CREATE INDEX transactions_open ON custody.transactions (expires_at) WHERE state = 'open';
CREATE INDEX transactions_ended ON custody.transactions (ended_at) WHERE state <> 'open';

CREATE TABLE custody.transaction_messages (
    transaction_id uuid NOT NULL REFERENCES custody.transactions ON DELETE CASCADE,
    n              int NOT NULL,
    topic_id       int NOT NULL,           -- no reference: if the topic is deleted, the whole transaction has to fail
    partition      int NOT NULL,
    placed_of      int,                    -- the number of partitions when Custody chose one; null: the caller named it
    key            text,
    kind           "char" NOT NULL,
    payload        bytea NOT NULL,
    headers        jsonb,
    deliver_at     timestamptz,
    delay          interval,               -- counted from the commit
    PRIMARY KEY (transaction_id, n),
    CHECK (deliver_at IS NULL OR delay IS NULL),
    CONSTRAINT message_form CHECK (kind IN ('j', 't', 'b') AND jsonb_typeof(headers) = 'object'),
    CONSTRAINT key_length CHECK (octet_length(key) <= 2000)
);

CREATE TABLE custody.transaction_acks (
    transaction_id uuid NOT NULL REFERENCES custody.transactions ON DELETE CASCADE,
    lease_id       uuid NOT NULL,
    offsets        int8multirange NOT NULL,
    PRIMARY KEY (transaction_id, lease_id)
);
