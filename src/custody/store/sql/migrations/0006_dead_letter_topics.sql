-- Dead-letter topics: see dead_letter.sql and replay.sql.

-- topic: what dies also leaves a copy in <topic>-dlq.
ALTER TABLE custody.groups ADD COLUMN dead_letter text NOT NULL DEFAULT 'keep' CHECK (dead_letter IN ('keep', 'topic'));

-- A copy is replayed once. What the first replay did is what every later one answers.
CREATE TABLE custody.replays (
    topic_id         int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,      -- of the dead-letter topic
    partition        int NOT NULL,
    "offset"         bigint NOT NULL,
    target           text NOT NULL,
    target_partition int NOT NULL,
    target_offset    bigint NOT NULL,
    resolved         boolean NOT NULL,      -- it also made the dead message done
    actor            text,
    reason           text,
    replayed_at      timestamptz NOT NULL,
    PRIMARY KEY (topic_id, partition, "offset")
);

-- One kind more; what is there was checked against fewer, so it is not read again.
ALTER TABLE custody.journal DROP CONSTRAINT journal_kind_check;
ALTER TABLE custody.journal ADD CONSTRAINT journal_kind_check CHECK (kind IN (
    'start', 'claim', 'ack', 'nack', 'dead', 'later', 'release', 'expire', 'extend', 'park',
    'redrive', 'rewind', 'skip', 'free', 'discard', 'pause', 'resume', 'policy', 'commit', 'breaker', 'replay')) NOT VALID;
