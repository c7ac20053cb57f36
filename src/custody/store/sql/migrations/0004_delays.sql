-- Messages that are not to be seen before their time: they wait beside the log, and are appended to it when they are due.
CREATE TABLE custody.delayed (
    delay_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    partition    int NOT NULL,
    deliver_at   timestamptz NOT NULL,
    key          text,
    kind         "char" NOT NULL,
    payload      bytea NOT NULL,
    headers      jsonb,
    delayed_at   timestamptz NOT NULL,
    CONSTRAINT message_form CHECK (kind IN ('j', 't', 'b') AND jsonb_typeof(headers) = 'object')
);
CREATE INDEX delayed_due ON custody.delayed (topic_id, partition, deliver_at, delay_id);

-- Nothing of this partition waits for an earlier time than this; null: nothing ever waited, and nobody has to look.
ALTER TABLE custody.heads ADD COLUMN delayed_from timestamptz;

-- For a publish of delayed messages `offsets` are their delay ids, and these their times.
ALTER TABLE custody.producer_receipts
    ADD COLUMN deliver_at timestamptz[] CHECK (cardinality(deliver_at) = cardinality(partitions));
