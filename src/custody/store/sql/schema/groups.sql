-- Groups: their policy, and how far each of them is on each partition.

CREATE TABLE custody.groups (
    group_id           int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id           int NOT NULL REFERENCES custody.topics ON DELETE CASCADE,
    name               text NOT NULL CHECK (name ~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$'),
    bare               boolean NOT NULL DEFAULT false,      -- offsets only, without a lifecycle

    -- The policy: the settings of custody.Policy, with their defaults and bounds. Durations end at 100 years.
    ordering           text NOT NULL DEFAULT 'none' CHECK (ordering IN ('none', 'key')),
    fairness           text CHECK (fairness IN ('key', 'tenant')),
    tenant_separator   text NOT NULL DEFAULT ':' CHECK (length(tenant_separator) BETWEEN 1 AND 200),
    max_attempts       int NOT NULL DEFAULT 3 CHECK (max_attempts >= 1),
    retry_for          interval CHECK (retry_for BETWEEN '1 ms' AND '36500 days'),
    backoff_kind       text NOT NULL DEFAULT 'exponential'
                       CHECK (backoff_kind IN ('exponential', 'linear', 'constant')),
    backoff_initial    interval NOT NULL DEFAULT '100 ms' CHECK (backoff_initial BETWEEN '0' AND '36500 days'),
    backoff_multiplier double precision NOT NULL DEFAULT 2 CHECK (backoff_multiplier BETWEEN 1 AND 1000),
    backoff_cap        interval NOT NULL DEFAULT '30 s' CHECK (backoff_cap BETWEEN '0' AND '36500 days'),
    backoff_jitter     double precision NOT NULL DEFAULT 0 CHECK (backoff_jitter BETWEEN 0 AND 1),
    visibility_timeout interval NOT NULL DEFAULT '30 s' CHECK (visibility_timeout BETWEEN '1 ms' AND '36500 days'),
    handler_timeout    interval DEFAULT '5 min' CHECK (handler_timeout BETWEEN '1 ms' AND '36500 days'),
    on_dead            text NOT NULL DEFAULT 'release' CHECK (on_dead IN ('release', 'hold')),
    dead_letter        text NOT NULL DEFAULT 'keep' CHECK (dead_letter IN ('keep', 'topic')),  -- topic: to <topic>-dlq
    max_in_flight      bigint CHECK (max_in_flight BETWEEN 1 AND 1::bigint << 62),
    max_ack_holes      bigint DEFAULT 10000 CHECK (max_ack_holes BETWEEN 1 AND 1::bigint << 62),
    max_parked         bigint CHECK (max_parked BETWEEN 1 AND 1::bigint << 62),
    breaker_rate       double precision CHECK (breaker_rate BETWEEN 0.01 AND 1),      -- null: no circuit breaker
    breaker_outcomes   int NOT NULL DEFAULT 20 CHECK (breaker_outcomes BETWEEN 1 AND 1000000),
    breaker_window     interval NOT NULL DEFAULT '10 s' CHECK (breaker_window BETWEEN '1 ms' AND '36500 days'),
    breaker_probe      interval NOT NULL DEFAULT '5 s' CHECK (breaker_probe BETWEEN '1 ms' AND '36500 days'),

    -- Which messages of the topic the group is bound to; null: all. The matcher is the compiled form of the bindings.
    bindings           jsonb CHECK (NOT bare OR bindings IS NULL),
    matcher            jsonb CHECK ((matcher IS NULL) = (bindings IS NULL)),
    binding_no         int NOT NULL DEFAULT 0,              -- counts the changes of the bindings

    -- What state the group is in.
    breaker_state      text NOT NULL DEFAULT 'closed' CHECK (breaker_state IN ('closed', 'open', 'probing')),
    breaker_since      timestamptz,
    breaker_reason     text,
    probe_at           timestamptz CHECK ((probe_at IS NULL) = (breaker_state = 'closed')),
    probe_lease        uuid,
    paused_at          timestamptz,
    paused_reason      text,
    created_at         timestamptz NOT NULL,
    UNIQUE (topic_id, name),
    CHECK (ordering = 'key' OR (fairness IS NULL AND on_dead = 'release'))
);

-- The cursor row is the lock under which a group's partition is claimed.
CREATE TABLE custody.cursors (
    group_id   int NOT NULL REFERENCES custody.groups ON DELETE CASCADE,
    partition  int NOT NULL,
    -- a claim that read its group before the group was bound anew notices it here
    binding_no int NOT NULL DEFAULT 0,
    PRIMARY KEY (group_id, partition)
);

-- The position of a group on a partition is the row with the highest claim_no. A claim appends a row and removes the
-- one before. A row updated in place would be read version by version while an old snapshot is held. Neither this table
-- nor the leases refer to their group: the check would cost every claim a tenth. Whoever deletes a group takes its
-- cursors first, and then removes both.
CREATE TABLE custody.frontiers (
    group_id     int NOT NULL,
    partition    int NOT NULL,
    claim_no     bigint NOT NULL,
    frontier     bigint NOT NULL,          -- the first offset that was never handed out
    oldest_claim bigint NOT NULL,          -- no earlier claim has a lease left: a scan of leases starts here
    seen         bigint NOT NULL DEFAULT 0,     -- an end of the log that a claim has read: there may be more by now
    PRIMARY KEY (group_id, partition, claim_no)
);
