-- Pipelines on Spark: who drives each, the claim that it has in flight, and what its batches came to.

-- A pipeline is a group that is driven by Spark. Each start takes a new epoch; a driver of an older one is fenced.
CREATE TABLE custody.pipelines (
    group_id    int PRIMARY KEY REFERENCES custody.groups ON DELETE CASCADE,
    epoch       bigint NOT NULL CHECK (epoch >= 1),
    last_claim  bigint NOT NULL DEFAULT 0,
    driver      text NOT NULL,
    started_at  timestamptz NOT NULL
);

-- How a pipeline fares, as its driver says it. Not in the row of the pipeline: a commit locks that for as long as it takes.
CREATE TABLE custody.pipeline_reports (
    group_id    int PRIMARY KEY REFERENCES custody.pipelines ON DELETE CASCADE,
    epoch       bigint NOT NULL,
    state       text NOT NULL CHECK (state IN ('running', 'retrying', 'stopped', 'failed')),
    since       timestamptz NOT NULL,      -- it is in this state
    tries       int NOT NULL,              -- failures in a row, without a batch committed in between
    last_error  text,                      -- it stays when the pipeline runs again
    error_at    timestamptz,
    seen_at     timestamptz NOT NULL       -- the driver was alive
);

-- The claim in flight: at most one. Its number is the key by which a commit is recognised when it is repeated.
CREATE TABLE custody.pipeline_claims (
    group_id    int PRIMARY KEY REFERENCES custody.pipelines ON DELETE CASCADE,
    claim       bigint NOT NULL,
    stage       text NOT NULL,
    claimed_at  timestamptz NOT NULL
);

-- What the claim took: one lease for each partition. It stays as it is until the commit, so that a replay reads the same.
CREATE TABLE custody.pipeline_parts (
    group_id    int NOT NULL REFERENCES custody.pipeline_claims ON DELETE CASCADE,
    partition   int NOT NULL,
    lease_id    uuid NOT NULL,
    held        int8multirange NOT NULL CHECK (NOT isempty(held)),
    messages    int NOT NULL CHECK (messages > 0),
    PRIMARY KEY (group_id, partition)
);

-- One row for each claim that was committed, whatever the number of messages.
CREATE TABLE custody.pipeline_batches (
    group_id     int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    claim        bigint NOT NULL,
    epoch        bigint NOT NULL,
    driver       text NOT NULL,
    query_id     text,
    batch_id     bigint,
    messages     bigint NOT NULL,
    done         bigint NOT NULL,
    failed       bigint NOT NULL,          -- those that died of it among them
    dead         bigint NOT NULL,
    later        bigint NOT NULL,
    released     bigint NOT NULL,
    lost         bigint NOT NULL,          -- the lease was gone before the commit: no output of these was published
    outputs      bigint NOT NULL,
    claimed_at   timestamptz NOT NULL,
    committed_at timestamptz NOT NULL,
    PRIMARY KEY (group_id, claim)
);

-- What a task of a second attempt was about to run. The last one of an attempt that did not come to its end (size 0) is
-- what ended its process. Unlogged: after a crash of the database it is merely found out again.
CREATE UNLOGGED TABLE custody.suspects (
    suspect_id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id    int NOT NULL,
    claim       bigint NOT NULL,
    attempt     bigint NOT NULL,
    partition   int NOT NULL,
    "offset"    bigint NOT NULL,
    size        int NOT NULL               -- so many messages from there on, in the order of the task
);
CREATE INDEX suspects_by_claim ON custody.suspects (group_id, claim);

-- Messages of the claim in flight whose handler has been running for long, as the watchdog of their process sees it. stopped:
-- it was about to kill the process for it. Unlogged: after a crash of the database it is merely found out again.
CREATE UNLOGGED TABLE custody.overdue (
    group_id    int NOT NULL,
    claim       bigint NOT NULL,
    partition   int NOT NULL,
    "offset"    bigint NOT NULL,
    since       timestamptz NOT NULL,
    stopped     boolean NOT NULL,
    PRIMARY KEY (group_id, claim, partition, "offset")
);

-- Messages of the claim in flight that do not fit the schema of their pipeline, as found by the task that read them.
CREATE TABLE custody.malformed (
    group_id    int NOT NULL,
    claim       bigint NOT NULL,
    partition   int NOT NULL,
    "offset"    bigint NOT NULL,
    error       text NOT NULL,
    PRIMARY KEY (group_id, claim, partition, "offset")
);

-- Tables into which tasks write what is to be published, until one transaction publishes it. Each is unlogged, and has the
-- name that is registered here.
CREATE TABLE custody.stages (
    name        text PRIMARY KEY CHECK (name ~ '^staged_[a-z0-9_]{1,50}$'),
    opened_at   timestamptz NOT NULL
);

-- What the plain sink has published of a streaming query: a replayed batch is not published again.
CREATE TABLE custody.sink_batches (
    query_id     text NOT NULL,
    topic_id     int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    batch_id     bigint NOT NULL,
    messages     bigint NOT NULL,
    committed_at timestamptz NOT NULL,
    PRIMARY KEY (query_id, topic_id, batch_id)
);
