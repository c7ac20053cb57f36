-- The tables of the core: the log, the groups, and what is kept of a group: its exceptions.
-- Functions and views are not here: they stand in their own files and are applied anew with every release.

CREATE TABLE custody.topics (
    topic_id     int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text NOT NULL UNIQUE CHECK (name ~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$'),
    partitions   int NOT NULL CHECK (partitions BETWEEN 1 AND 4096),
    max_depth    bigint CHECK (max_depth > 0),
    created_at   timestamptz NOT NULL,
    uid          uuid NOT NULL DEFAULT gen_random_uuid()    -- tells a topic from one that had its name before, in any database
);

-- A segment is a stretch of a topic's log over all its partitions, and one table. Retention drops whole segments.
CREATE TABLE custody.segments (
    segment_id   int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    created_at   timestamptz NOT NULL,
    sealed_at    timestamptz,
    dropped_at   timestamptz CHECK (dropped_at IS NULL OR sealed_at IS NOT NULL)
);
CREATE UNIQUE INDEX segments_open ON custody.segments (topic_id) WHERE sealed_at IS NULL;

CREATE TABLE custody.segment_bounds (
    segment_id   int NOT NULL REFERENCES custody.segments ON DELETE CASCADE,
    partition    int NOT NULL,
    first_offset bigint NOT NULL,
    PRIMARY KEY (segment_id, partition)
);

-- The head row is the lock under which a partition grows. Publishing never updates it: the next offset is read from
-- the log. It changes only when a segment is sealed or dropped.
CREATE TABLE custody.heads (
    topic_id      int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    partition     int NOT NULL,
    first_offset  bigint NOT NULL DEFAULT 0,
    segment_id    int NOT NULL,
    segment_start bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (topic_id, partition)
);

CREATE TABLE custody.log (
    segment_id   int NOT NULL,
    partition    int NOT NULL,
    "offset"     bigint NOT NULL,
    published_at timestamptz NOT NULL,
    key          text,
    kind         "char" NOT NULL,
    payload      bytea NOT NULL,
    headers      jsonb,
    -- what readers can decode; whether headers are texts and a payload is what its kind says, the functions check (require_message)
    CONSTRAINT message_form CHECK (kind IN ('j', 't', 'b') AND jsonb_typeof(headers) = 'object')
) PARTITION BY LIST (segment_id);

-- Events of dead messages whose segment was dropped: kept until an operator discards the dead letter.
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
    offsets        bigint[] NOT NULL,
    PRIMARY KEY (producer_id, epoch, last_sequence),
    CHECK (cardinality(partitions) = last_sequence - first_sequence + 1),
    CHECK (cardinality(offsets) = cardinality(partitions))
);

CREATE TABLE custody.groups (
    group_id           int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id           int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    name               text NOT NULL CHECK (name ~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$'),
    bare               boolean NOT NULL DEFAULT false,
    ordering           text NOT NULL CHECK (ordering IN ('none', 'key')),
    max_attempts       int NOT NULL CHECK (max_attempts >= 1),
    backoff_kind       text NOT NULL CHECK (backoff_kind IN ('exponential', 'linear', 'constant')),
    backoff_initial    interval NOT NULL CHECK (backoff_initial >= '0'),
    backoff_multiplier double precision NOT NULL CHECK (backoff_multiplier >= 1),
    backoff_cap        interval NOT NULL CHECK (backoff_cap >= '0'),
    backoff_jitter     double precision NOT NULL CHECK (backoff_jitter BETWEEN 0 AND 1),
    visibility_timeout interval NOT NULL CHECK (visibility_timeout > '0'),
    handler_timeout    interval CHECK (handler_timeout > '0'),
    on_dead            text NOT NULL CHECK (on_dead IN ('release', 'hold')),
    max_in_flight      bigint CHECK (max_in_flight >= 1),
    max_ack_holes      bigint CHECK (max_ack_holes >= 1),
    max_parked         bigint CHECK (max_parked >= 1),
    breaker_rate       double precision CHECK (breaker_rate > 0 AND breaker_rate <= 1),     -- null: no circuit breaker
    breaker_outcomes   int NOT NULL DEFAULT 20 CHECK (breaker_outcomes >= 1),
    breaker_window     interval NOT NULL DEFAULT '10 s' CHECK (breaker_window > '0'),
    breaker_probe      interval NOT NULL DEFAULT '5 s' CHECK (breaker_probe > '0'),
    breaker_state      text NOT NULL DEFAULT 'closed' CHECK (breaker_state IN ('closed', 'open', 'probing')),
    breaker_since      timestamptz,
    breaker_reason     text,
    probe_at           timestamptz CHECK ((probe_at IS NULL) = (breaker_state = 'closed')),
    probe_lease        uuid,
    paused_at          timestamptz,
    paused_reason      text,
    created_at         timestamptz NOT NULL,
    UNIQUE (topic_id, name)
);

-- The cursor row is the lock under which a group's partition is claimed, and nothing else.
CREATE TABLE custody.cursors (
    group_id  int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    partition int NOT NULL,
    PRIMARY KEY (group_id, partition)
);

-- Where a group stands on a partition: the newest row (the highest claim_no) counts. A claim appends a row and removes
-- the one before it; a row updated in place would be walked through, version by version, under a held xmin.
-- Neither this table nor the leases refer to their group: the check would cost every claim a tenth. Whoever deletes a
-- group takes its cursors first, and then removes both.
CREATE TABLE custody.frontiers (
    group_id     int NOT NULL,
    partition    int NOT NULL,
    claim_no     bigint NOT NULL,
    frontier     bigint NOT NULL,          -- the first offset never handed out
    oldest_claim bigint NOT NULL,          -- no lease of an earlier claim is left: where a scan of leases may start
    PRIMARY KEY (group_id, partition, claim_no)
);

CREATE TABLE custody.leases (
    group_id       int NOT NULL,
    partition      int NOT NULL,
    claim_no       bigint NOT NULL,
    part           int NOT NULL,
    lease_id       uuid NOT NULL,
    held           int8multirange NOT NULL CHECK (NOT isempty(held)),
    remaining      int NOT NULL CHECK (remaining > 0),
    of_cases       boolean NOT NULL,       -- true: each offset has its own case, which knows its attempts
    attempt        int NOT NULL,
    size           int NOT NULL,           -- messages in the whole lease when it was claimed; 0: leased by a pipeline
    deadline       timestamptz NOT NULL,
    claimed_at     timestamptz NOT NULL,
    worker         text,
    first_delivery timestamptz,
    last_error     text,
    PRIMARY KEY (group_id, partition, claim_no, part)
);
CREATE INDEX leases_by_id ON custody.leases (lease_id);

-- What came back in bulk: one row, however many messages. `chunk` bounds the next lease that takes from it.
CREATE TABLE custody.returned (
    group_id       int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    partition      int NOT NULL,
    return_id      bigint GENERATED ALWAYS AS IDENTITY,
    ranges         int8multirange NOT NULL CHECK (NOT isempty(ranges)),
    attempts       int NOT NULL CHECK (attempts >= 0),
    chunk          int CHECK (chunk >= 1),
    first_delivery timestamptz,
    last_error     text,
    returned_at    timestamptz NOT NULL,
    PRIMARY KEY (group_id, partition, return_id)
);

-- One row for each message to which something happened alone.
--   waiting  ready, due at run_at        parked  ready, behind an earlier message of its key
--   leased   processing                  dead    dead; `held` while its key has to wait for the operator
CREATE TABLE custody.cases (
    group_id       int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    partition      int NOT NULL,
    "offset"       bigint NOT NULL,
    key            text,
    state          text NOT NULL CHECK (state IN ('waiting', 'parked', 'leased', 'dead')),
    held           boolean NOT NULL DEFAULT false CHECK (NOT held OR state = 'dead'),
    attempts       int NOT NULL CHECK (attempts >= 0),
    failures       int NOT NULL CHECK (failures >= 0),
    run_at         timestamptz NOT NULL,
    lease_cap      int CHECK (lease_cap >= 1),    -- the most messages that may be leased together with this one
    first_delivery timestamptz,
    first_failure  timestamptz,
    last_error     text,
    errors         text[] NOT NULL DEFAULT '{}',
    dead_reason    text CHECK ((dead_reason IS NULL) = (state <> 'dead')),
    worker         text,
    updated_at     timestamptz NOT NULL,
    PRIMARY KEY (group_id, partition, "offset")
);
CREATE INDEX cases_due ON custody.cases (group_id, partition, run_at) WHERE state = 'waiting';
CREATE INDEX cases_open_by_key ON custody.cases (group_id, partition, key, "offset")
    WHERE key IS NOT NULL AND (state <> 'dead' OR held);
CREATE INDEX cases_parked ON custody.cases (group_id, partition) WHERE state = 'parked';
CREATE INDEX cases_dead ON custody.cases (group_id, updated_at) WHERE state = 'dead';

-- Messages of a blocked key that were never handed out, passed over by the frontier: in runs, many to a row.
CREATE TABLE custody.parked (
    group_id     int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    partition    int NOT NULL,
    key          text NOT NULL,
    first_offset bigint NOT NULL,
    ranges       int8multirange NOT NULL CHECK (NOT isempty(ranges) AND lower(ranges) = first_offset),
    messages     int NOT NULL CHECK (messages > 0),
    parked_at    timestamptz NOT NULL,
    PRIMARY KEY (group_id, partition, key, first_offset)
);

-- Keys to look at again, never a lock: whether a key is blocked is always derived from leases and cases.
-- freed: something of the key was resolved. Written by settle, read by the next claim before it reads the cases.
CREATE TABLE custody.freed (
    group_id  int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    partition int NOT NULL,
    freed_id  bigint GENERATED ALWAYS AS IDENTITY,
    key       text NOT NULL,
    PRIMARY KEY (group_id, partition, freed_id)
);
-- awaited: messages of the key are parked behind a live lease. Written and read by claims only, under the cursor lock.
CREATE TABLE custody.awaited (
    group_id  int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    partition int NOT NULL,
    key       text NOT NULL,
    PRIMARY KEY (group_id, partition, key)
);

-- One row for each operation: the history of every message. The tables above must always equal its fold.
CREATE TABLE custody.journal (
    entry      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL,
    xid        xid8 NOT NULL DEFAULT pg_current_xact_id(),
    kind       text NOT NULL CHECK (kind IN (
        'start', 'claim', 'ack', 'nack', 'dead', 'later', 'release', 'expire', 'extend', 'park',
        'redrive', 'rewind', 'skip', 'free', 'discard', 'pause', 'resume', 'policy', 'commit', 'breaker')),
    group_id   int NOT NULL,
    partition  int,
    lease_id   uuid,
    offsets    int8multirange,
    worker     text,
    error      text,
    detail     jsonb
);
CREATE INDEX journal_by_group ON custody.journal (group_id, partition, entry);
