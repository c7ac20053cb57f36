-- The log: topics, their segments and the messages.

CREATE TABLE custody.topics (
    topic_id         int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    uid              uuid NOT NULL DEFAULT gen_random_uuid(),   -- unique in all databases, and never given again
    name             text NOT NULL UNIQUE CHECK (name ~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$'),
    partitions       int NOT NULL CHECK (partitions BETWEEN 1 AND 4096),
    max_depth        bigint CHECK (max_depth > 0),
    starvation_limit interval CHECK (starvation_limit > '0'),   -- not null: the topic has priorities
    retention_time   interval CHECK (retention_time BETWEEN '1 ms' AND '36500 days'),   -- both null: all is kept
    retention_bytes  bigint CHECK (retention_bytes BETWEEN 1 AND 1::bigint << 62),
    segment_time     interval CHECK (segment_time BETWEEN '1 ms' AND '36500 days'),       -- sealed at this age or size
    segment_bytes    bigint CHECK (segment_bytes BETWEEN 1 AND 1::bigint << 62),
    drop_unresolved  boolean NOT NULL DEFAULT false,
    created_at       timestamptz NOT NULL,
    -- With priorities each partition of the user is five in the log: a lane for each priority.
    CHECK (starvation_limit IS NULL OR partitions % 5 = 0)
);

-- A segment is a stretch of a topic's log over all its partitions, and one table. Retention drops whole segments.
CREATE TABLE custody.segments (
    segment_id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id   int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    created_at timestamptz NOT NULL,
    sealed_at  timestamptz,
    dropped_at timestamptz CHECK (dropped_at IS NULL OR sealed_at IS NOT NULL)
);
CREATE UNIQUE INDEX segments_open ON custody.segments (topic_id) WHERE sealed_at IS NULL;
CREATE INDEX segments_kept ON custody.segments (topic_id, segment_id) WHERE dropped_at IS NULL;

CREATE TABLE custody.segment_bounds (
    segment_id   int NOT NULL REFERENCES custody.segments ON DELETE CASCADE,
    partition    int NOT NULL,
    first_offset bigint NOT NULL,
    PRIMARY KEY (segment_id, partition)
);

-- A publisher locks the head row of its partition. A publish never updates the row, so it leaves no dead versions: the
-- next offset is read from the log. The row changes when a segment is sealed or dropped, when the topic grows, and when
-- delayed messages come or go.
CREATE TABLE custody.heads (
    topic_id      int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    partition     int NOT NULL,
    partitions    int NOT NULL,                -- as in topics: a publisher reads it under this lock
    first_offset  bigint NOT NULL DEFAULT 0,
    segment_id    int NOT NULL,                -- the open segment, and the first offset in it
    segment_start bigint NOT NULL DEFAULT 0,
    grown_at      bigint NOT NULL DEFAULT 0,   -- keys of messages before this offset may belong to other partitions now
    delayed_from  timestamptz,                 -- no delayed message is due earlier; null: there never was one
    PRIMARY KEY (topic_id, partition)
);

-- Each segment is a table of its own, log_<segment_id>: see open_segment.
CREATE TABLE custody.log (
    segment_id   int NOT NULL,
    partition    int NOT NULL,
    "offset"     bigint NOT NULL,
    published_at timestamptz NOT NULL,
    key          text,
    kind         "char" NOT NULL,              -- of the payload: j is JSON, t text, b bytes
    payload      bytea,
    headers      jsonb,
    -- A batch: `offset` is that of its last message. What its messages do not have in common is in these columns.
    n            int NOT NULL DEFAULT 1,       -- messages in the row
    payloads     bytea,                        -- joined
    ends         int[],                        -- where each payload ends
    keys         text[],                       -- null: no message has one
    kinds        text,                         -- a letter for each; null: all are of `kind`
    headers_each jsonb[],                      -- null: no message has any
    -- What readers rely on. The functions check more: that headers are texts and that the payload is of its kind.
    CONSTRAINT message_form CHECK (kind IN ('j', 't', 'b') AND jsonb_typeof(headers) = 'object'
                                   AND (payload IS NOT NULL) = (n = 1) AND (ends IS NULL) = (n = 1)),
    -- A key is in indexes of the groups' state, whose entries have less than 2,704 bytes. A longer key would be
    -- accepted here and fail every claim of its partition.
    CONSTRAINT key_length CHECK (octet_length(key) <= 2000)
) PARTITION BY LIST (segment_id);
ALTER TABLE custody.log
    ALTER payloads SET STORAGE EXTERNAL, ALTER ends SET STORAGE EXTERNAL, ALTER keys SET STORAGE EXTERNAL,
    ALTER kinds SET STORAGE EXTERNAL;

-- Dead messages whose segment was dropped. They stay until an operator discards the dead letter.
CREATE TABLE custody.kept_events (
    topic_id     int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    segment_id   int NOT NULL,
    partition    int NOT NULL,
    "offset"     bigint NOT NULL,
    published_at timestamptz NOT NULL,
    key          text,
    kind         "char" NOT NULL,
    payload      bytea NOT NULL,
    headers      jsonb,
    PRIMARY KEY (topic_id, partition, "offset")
);
CREATE INDEX kept_events_by_segment ON custody.kept_events (segment_id, partition, "offset");

-- Delayed messages. They wait beside the log and are appended to it when they are due.
CREATE TABLE custody.delayed (
    delay_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id   int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    partition  int NOT NULL,
    deliver_at timestamptz NOT NULL,
    key        text,
    kind       "char" NOT NULL,
    payload    bytea NOT NULL,
    headers    jsonb,
    delayed_at timestamptz NOT NULL,
    CONSTRAINT message_form CHECK (kind IN ('j', 't', 'b') AND jsonb_typeof(headers) = 'object'),
    CONSTRAINT key_length CHECK (octet_length(key) <= 2000)
);
CREATE INDEX delayed_due ON custody.delayed (topic_id, partition, deliver_at, delay_id);
