-- The journal: one row for each operation, and so the history of every message. The state of a group must always equal
-- what its entries add up to.

-- Before PostgreSQL 17 the partitions of a table cannot share an identity column, so the entries have a sequence.
CREATE SEQUENCE custody.journal_entries;

CREATE TABLE custody.journal (
    entry     bigint NOT NULL DEFAULT nextval('custody.journal_entries') PRIMARY KEY,
    at        timestamptz NOT NULL,
    xid       xid8 NOT NULL DEFAULT pg_current_xact_id(),
    kind      text NOT NULL CHECK (kind IN (
        'start', 'drop', 'claim', 'pass', 'ack', 'nack', 'dead', 'later', 'release', 'expire', 'extend', 'park',
        'redrive', 'hasten', 'rewind', 'skip', 'free', 'discard', 'pause', 'resume', 'policy', 'commit', 'breaker',
        'replay')),
    group_id  int NOT NULL,
    partition int,
    lease_id  uuid,
    offsets   int8multirange,
    worker    text,
    error     text,
    detail    jsonb
) PARTITION BY RANGE (entry);
ALTER SEQUENCE custody.journal_entries OWNED BY custody.journal.entry;
CREATE INDEX journal_by_group ON custody.journal (group_id, partition, entry);

-- Part n has the entries from n * 2^40 on. That is room for more than will ever be written, so the bounds of a part
-- never change. The next part is attached empty, and then the sequence moves on to it: no writer waits, and if upkeep
-- never runs, the open part just grows.
CREATE TABLE custody.journal_0 PARTITION OF custody.journal FOR VALUES FROM (MINVALUE) TO (1099511627776);

CREATE TABLE custody.journal_parts (
    part       int PRIMARY KEY CHECK (part >= 0),
    created_at timestamptz NOT NULL,
    sealed_at  timestamptz,                -- new entries go to the next part since then
    opened_by  xid8 NOT NULL DEFAULT pg_current_xact_id()
);
INSERT INTO custody.journal_parts (part, created_at) VALUES (0, now());

-- One row.
CREATE TABLE custody.journal_settings (
    one             boolean PRIMARY KEY DEFAULT true CHECK (one),
    retention_time  interval CHECK (retention_time > '0'),
    retention_bytes bigint CHECK (retention_bytes > 0),
    dropped_until   timestamptz            -- entries before this time may be gone
);
INSERT INTO custody.journal_settings DEFAULT VALUES;
