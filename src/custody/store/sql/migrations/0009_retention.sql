-- Retention by itself: what a topic keeps, the journal in parts, and topics that grow.

-- Null: kept for ever. A segment ends when it is as old or as large as its column says.
ALTER TABLE custody.topics
    ADD COLUMN retention_time  interval CHECK (retention_time > '0'),
    ADD COLUMN retention_bytes bigint CHECK (retention_bytes > 0),
    ADD COLUMN segment_time    interval CHECK (segment_time > '0'),
    ADD COLUMN segment_bytes   bigint CHECK (segment_bytes > 0),
    ADD COLUMN drop_unresolved boolean NOT NULL DEFAULT false;

CREATE INDEX segments_kept ON custody.segments (topic_id, segment_id) WHERE dropped_at IS NULL;

-- Among how many partitions the keys of the topic are spread. It stands here too, because a publisher has to know it under the
-- lock that it holds, and without another statement.
ALTER TABLE custody.heads ADD COLUMN partitions int;
UPDATE custody.heads h SET partitions = t.partitions FROM custody.topics t WHERE t.topic_id = h.topic_id;
ALTER TABLE custody.heads ALTER COLUMN partitions SET NOT NULL;

-- Where the partition ended when the topic last grew: the keys of earlier messages may belong to other partitions now.
ALTER TABLE custody.heads ADD COLUMN grown_at bigint NOT NULL DEFAULT 0;

-- The journal in parts. Part n has the entries from n * 2^40 on: room for as much as will ever be written, so the bounds of a part
-- never change. To go on to the next part is to attach it, empty, and then to move the sequence on: nobody waits for that, and
-- if nobody does it, the part just grows.
CREATE TABLE custody.journal_parts (
    part       int PRIMARY KEY CHECK (part >= 0),
    created_at timestamptz NOT NULL,
    sealed_at  timestamptz,                -- since when new entries go to the next one
    opened_by  xid8 NOT NULL DEFAULT pg_current_xact_id()
);
CREATE TABLE custody.journal_settings (
    one             boolean PRIMARY KEY DEFAULT true CHECK (one),
    retention_time  interval CHECK (retention_time > '0'),
    retention_bytes bigint CHECK (retention_bytes > 0),
    dropped_until   timestamptz            -- what happened before is no longer known
);
INSERT INTO custody.journal_settings DEFAULT VALUES;
INSERT INTO custody.journal_parts (part, created_at) VALUES (0, now());

-- The kinds that there are, whichever migrations added them, and one more.
DO $$
DECLARE
    v_check text := (SELECT pg_get_constraintdef(oid) FROM pg_constraint
                     WHERE conrelid = 'custody.journal'::regclass AND conname = 'journal_kind_check');
BEGIN
    ALTER TABLE custody.journal DROP CONSTRAINT journal_kind_check;
    EXECUTE 'ALTER TABLE custody.journal ADD CONSTRAINT journal_kind_check ' ||
        replace(replace(v_check, '''start''::text', '''start''::text, ''drop''::text'), ' NOT VALID', '');
END $$;

-- Before PostgreSQL 17 the parts of a table cannot share an identity column: a sequence does the same on all versions.
CREATE SEQUENCE custody.journal_entries;
SELECT setval('custody.journal_entries', coalesce(max(entry), 0) + 1, false) FROM custody.journal;
ALTER TABLE custody.journal ALTER COLUMN entry DROP IDENTITY;
ALTER TABLE custody.journal ALTER COLUMN entry SET DEFAULT nextval('custody.journal_entries');
ALTER TABLE custody.journal RENAME TO journal_0;
ALTER TABLE custody.journal_0 RENAME CONSTRAINT journal_pkey TO journal_0_pkey;
ALTER INDEX custody.journal_by_group RENAME TO journal_0_group_id_partition_entry_idx;
CREATE TABLE custody.journal (LIKE custody.journal_0 INCLUDING DEFAULTS INCLUDING CONSTRAINTS, PRIMARY KEY (entry)) PARTITION BY RANGE (entry);
CREATE INDEX journal_by_group ON custody.journal (group_id, partition, entry);
ALTER TABLE custody.journal ATTACH PARTITION custody.journal_0 FOR VALUES FROM (MINVALUE) TO (1099511627776);
ALTER SEQUENCE custody.journal_entries OWNED BY custody.journal.entry;
