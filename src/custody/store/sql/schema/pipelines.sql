-- Pipelines on Spark: who drives each, the claim that it has in flight, and the result of its batches.

-- All pipelines draw their epochs from one sequence: a pipeline that is made anew never gets an epoch again that its
-- earlier drivers had.
CREATE SEQUENCE custody.epochs;

-- A pipeline is a group that Spark drives. Each start takes a new epoch, which fences drivers of older ones.
CREATE TABLE custody.pipelines (
    group_id   int PRIMARY KEY REFERENCES custody.groups ON DELETE CASCADE,
    uid        uuid NOT NULL DEFAULT gen_random_uuid(),  -- unique in all databases, and new if the group is made anew
    epoch      bigint NOT NULL CHECK (epoch >= 1),
    last_claim bigint NOT NULL DEFAULT 0,
    state_changes bigint NOT NULL DEFAULT 0,           -- how often an operator has removed states of keys
    driver     text NOT NULL,
    started_at timestamptz NOT NULL
);

-- The state of a pipeline as its driver reports it. It has a table of its own, because a commit keeps the row of the
-- pipeline locked for as long as it takes.
CREATE TABLE custody.pipeline_reports (
    group_id   int PRIMARY KEY REFERENCES custody.pipelines ON DELETE CASCADE,
    epoch      bigint NOT NULL,
    state      text NOT NULL CHECK (state IN ('running', 'retrying', 'stopped', 'failed')),
    since      timestamptz NOT NULL,       -- when this state began
    tries      int NOT NULL,               -- failures in a row, without a committed batch in between
    last_error text,                       -- stays when the pipeline runs again
    error_at   timestamptz,
    seen_at    timestamptz NOT NULL        -- when the driver was last alive
);

-- The claim in flight: at most one. A repeated commit is recognised by its number.
CREATE TABLE custody.pipeline_claims (
    group_id   int PRIMARY KEY REFERENCES custody.pipelines ON DELETE CASCADE,
    claim      bigint NOT NULL,
    stage      text NOT NULL,
    claimed_at timestamptz NOT NULL
);

-- What the claim took: one lease for each partition. It does not change before the commit, so that a replayed batch
-- reads the same messages.
CREATE TABLE custody.pipeline_parts (
    group_id  int NOT NULL REFERENCES custody.pipeline_claims ON DELETE CASCADE,
    partition int NOT NULL,
    lease_id  uuid NOT NULL,
    held      int8multirange NOT NULL CHECK (NOT isempty(held)),
    messages  int NOT NULL CHECK (messages > 0),
    PRIMARY KEY (group_id, partition)
);

-- One row for each committed claim, whatever the number of messages.
CREATE TABLE custody.pipeline_batches (
    group_id     int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    claim        bigint NOT NULL,
    epoch        bigint NOT NULL,
    driver       text NOT NULL,
    query_id     text,
    batch_id     bigint,
    messages     bigint NOT NULL,
    done         bigint NOT NULL,
    failed       bigint NOT NULL,          -- with those that died of it
    dead         bigint NOT NULL,
    later        bigint NOT NULL,
    skipped      bigint NOT NULL,
    released     bigint NOT NULL,
    lost         bigint NOT NULL,          -- the lease was gone before the commit: no output of these was published
    outputs      bigint NOT NULL,
    claimed_at   timestamptz NOT NULL,
    committed_at timestamptz NOT NULL,
    PRIMARY KEY (group_id, claim)
);

-- What a task of a second attempt is about to run. The last row of an attempt that has no end (size 0) names the
-- messages that ended its process. Unlogged: after a crash of the database the next attempt finds them again.
CREATE UNLOGGED TABLE custody.suspects (
    suspect_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id   int NOT NULL,
    claim      bigint NOT NULL,
    attempt    bigint NOT NULL,
    partition  int NOT NULL,
    "offset"   bigint NOT NULL,
    size       int NOT NULL                -- so many messages from there on, in the order of the task
);
CREATE INDEX suspects_by_claim ON custody.suspects (group_id, claim);

-- Messages of the claim in flight whose handler has been running for long, as the watchdog of the process reports them.
-- Unlogged, as suspects.
CREATE UNLOGGED TABLE custody.overdue (
    group_id  int NOT NULL,
    claim     bigint NOT NULL,
    partition int NOT NULL,
    "offset"  bigint NOT NULL,
    since     timestamptz NOT NULL,
    stopped   boolean NOT NULL,            -- the watchdog was about to kill the process for it
    PRIMARY KEY (group_id, claim, partition, "offset")
);

-- Messages of the claim in flight that do not fit the schema of the pipeline, as the tasks that read them found.
CREATE TABLE custody.malformed (
    group_id  int NOT NULL,
    claim     bigint NOT NULL,
    partition int NOT NULL,
    "offset"  bigint NOT NULL,
    error     text NOT NULL,
    PRIMARY KEY (group_id, claim, partition, "offset")
);

-- Tasks write their output into unlogged tables, one for each claim or batch, until one transaction publishes it. Each
-- table has the name that is registered here.
CREATE TABLE custody.stages (
    name      text PRIMARY KEY CHECK (name ~ '^staged_[a-z0-9_]{1,50}$'),
    opened_at timestamptz NOT NULL,
    stage_id  bigint GENERATED ALWAYS AS IDENTITY   -- the upper bits of the places of its rows in the log
);

-- The segments of the log into which tasks have written rows of a stage, and numbers for these rows.
CREATE TABLE custody.stage_segments (
    stage      text NOT NULL REFERENCES custody.stages ON DELETE CASCADE,
    topic_id   int NOT NULL,
    segment_id int NOT NULL,
    PRIMARY KEY (stage, segment_id)
);
CREATE SEQUENCE custody.stage_places;

-- Output to sinks outside the database that was begun and is not finished: see pipeline_writes.sql.
CREATE TABLE custody.pipeline_writes (
    group_id  int NOT NULL REFERENCES custody.pipelines ON DELETE CASCADE,
    claim     bigint NOT NULL,
    epoch     bigint NOT NULL,             -- of the driver that wrote it
    token     text NOT NULL,               -- of this attempt to write it: the last one counts
    sinks     text[] NOT NULL,             -- those that have something to publish after the commit
    committed boolean NOT NULL,            -- the claim was committed: the output has to be published
    PRIMARY KEY (group_id, claim)
);

-- What the plain sink has published of a streaming query, so that a replayed batch is not published again.
CREATE TABLE custody.sink_batches (
    query_id     text NOT NULL,
    topic_id     int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    batch_id     bigint NOT NULL,
    messages     bigint NOT NULL,
    committed_at timestamptz NOT NULL,
    PRIMARY KEY (query_id, topic_id, batch_id)
);
