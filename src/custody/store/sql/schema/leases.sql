-- Messages that are not simply before or behind the frontier: in flight, back from a lease, or with a story of their
-- own.

-- A lease is one row for each part of it: its fresh messages, each row of `returned` that it took from, its retries.
CREATE TABLE custody.leases (
    group_id       int NOT NULL,
    partition      int NOT NULL,
    claim_no       bigint NOT NULL,
    part           int NOT NULL,
    lease_id       uuid NOT NULL,
    held           int8multirange NOT NULL CHECK (NOT isempty(held)),
    remaining      int NOT NULL CHECK (remaining > 0),
    -- Messages that the holder has settled. Over all rows of a lease `settled` and `remaining` add up to `size`, unless
    -- messages were lost by a rewind or by expiry: so a settle of the whole lease notices a loss without the journal.
    settled        int NOT NULL DEFAULT 0,
    of_cases       boolean NOT NULL,       -- each offset has a case, which counts its attempts
    attempt        int NOT NULL,
    size           int NOT NULL,           -- messages in the whole lease when it was claimed; 0: claimed by a pipeline
    deadline       timestamptz NOT NULL,
    claimed_at     timestamptz NOT NULL,
    worker         text,
    first_delivery timestamptz,
    last_error     text,
    PRIMARY KEY (group_id, partition, claim_no, part)
);
CREATE INDEX leases_by_id ON custody.leases (lease_id);

-- Messages that came back in bulk (a release, an expiry, a rewind): one row, however many there are.
CREATE TABLE custody.returned (
    group_id       int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    partition      int NOT NULL,
    return_id      bigint GENERATED ALWAYS AS IDENTITY,
    ranges         int8multirange NOT NULL CHECK (NOT isempty(ranges)),
    attempts       int NOT NULL CHECK (attempts >= 0),
    chunk          int CHECK (chunk >= 1),             -- the most messages that the next lease may take from this row
    rewound        boolean NOT NULL DEFAULT false,     -- the bindings of the group were not applied to these yet
    first_delivery timestamptz,
    last_error     text,
    returned_at    timestamptz NOT NULL,
    PRIMARY KEY (group_id, partition, return_id)
);

-- One row for each message with a story of its own.
--   waiting  ready, due at run_at        parked  ready, behind an earlier message of its key
--   leased   processing                  dead    dead; `held` while its key has to wait for the operator
CREATE TABLE custody.cases (
    group_id       int NOT NULL,               -- deleted by remove_group: a foreign key would be checked for each row
    partition      int NOT NULL,
    "offset"       bigint NOT NULL,
    key            text,
    state          text NOT NULL CHECK (state IN ('waiting', 'parked', 'leased', 'dead')),
    held           boolean NOT NULL DEFAULT false CHECK (NOT held OR state = 'dead'),
    attempts       int NOT NULL CHECK (attempts >= 0),
    failures       int NOT NULL CHECK (failures >= 0),
    run_at         timestamptz NOT NULL,
    lease_cap      int CHECK (lease_cap >= 1),         -- the most messages that may be leased together with this one
    first_delivery timestamptz,
    first_failure  timestamptz,
    last_error     text,
    last_traceback text CHECK (length(last_traceback) <= 2000),    -- of the last error, if its holder gave one
    errors         text[] NOT NULL DEFAULT '{}',
    dead_reason    text CHECK ((dead_reason IS NULL) = (state <> 'dead')),
    worker         text,
    updated_at     timestamptz NOT NULL,
    -- A message that dies takes a copy of itself along, so that nobody looks for dead letters in the log.
    published_at   timestamptz,
    kind           "char",
    payload        bytea,
    headers        jsonb,
    PRIMARY KEY (group_id, partition, "offset"),
    CHECK ((payload IS NOT NULL) = (state = 'dead'))
);
CREATE INDEX cases_due ON custody.cases (group_id, partition, run_at) WHERE state = 'waiting';
CREATE INDEX cases_open_by_key ON custody.cases (group_id, partition, key, "offset")
    WHERE key IS NOT NULL AND (state <> 'dead' OR held);
CREATE INDEX cases_parked ON custody.cases (group_id, partition) WHERE state = 'parked';
CREATE INDEX cases_dead ON custody.cases (group_id, updated_at) WHERE state = 'dead';

-- Messages of a blocked key that were never handed out and that the frontier has passed: runs, many messages to a row.
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

-- `freed` and `awaited` are hints: keys that a claim has to look at again. They never decide whether a key is blocked;
-- that is always derived from leases and cases.

-- Something of the key was resolved. Settles write it, and the next claim reads it before it reads the cases.
-- `most`: the key has failed, and comes back with at most so many parked messages. Null: with any number.
CREATE TABLE custody.freed (
    group_id  int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    partition int NOT NULL,
    freed_id  bigint GENERATED ALWAYS AS IDENTITY,
    key       text NOT NULL,
    most      int CHECK (most >= 1),
    PRIMARY KEY (group_id, partition, freed_id)
);

-- Messages of the key are parked behind a live lease. Only claims write and read it, under the cursor. As long as the
-- message `behind` is in flight, a claim need not look at the key. What it says may be out of date, but then that
-- message is not in flight any more.
CREATE TABLE custody.awaited (
    group_id  int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    partition int NOT NULL,
    key       text NOT NULL,
    tenant    text,                        -- of a group with fairness: by key, all keys have the same tenant
    turn      xid8,                        -- when the key had its turn
    behind    bigint,                      -- a message of the key in flight; null: not known
    most      int CHECK (most >= 1),       -- the key has failed: the most parked messages that the next claim may take
    PRIMARY KEY (group_id, partition, key),
    CHECK ((tenant IS NULL) = (turn IS NULL))
);
-- Rows without a tenant are in this index too: a group that has just become fair has some.
CREATE INDEX awaited_turns ON custody.awaited (group_id, partition, tenant, turn);
CREATE INDEX awaited_longest ON custody.awaited (group_id, partition, turn) WHERE tenant IS NOT NULL;

-- A copy in a dead-letter topic is replayed once. Every later replay answers what the first one did.
CREATE TABLE custody.replays (
    topic_id         int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,  -- the dead-letter topic
    partition        int NOT NULL,
    "offset"         bigint NOT NULL,
    target           text NOT NULL,
    target_partition int NOT NULL,
    target_offset    bigint NOT NULL,
    resolved         boolean NOT NULL,     -- the replay also made the dead message done
    actor            text,
    reason           text,
    replayed_at      timestamptz NOT NULL,
    PRIMARY KEY (topic_id, partition, "offset")
);
