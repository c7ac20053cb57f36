-- Sinks of pipelines outside of the database: see outside.sql.

-- Tells a pipeline from another one of the same name, in another database or after its group was made anew.
ALTER TABLE custody.pipelines ADD COLUMN uid uuid NOT NULL DEFAULT gen_random_uuid();

-- Epochs are drawn for all pipelines together: one that is made anew never has an epoch that its drivers had before.
CREATE SEQUENCE custody.epochs;
SELECT setval('custody.epochs', (SELECT coalesce(max(epoch), 0) + 1 FROM custody.pipelines), false);

-- What was begun outside and is not over.
CREATE TABLE custody.pipeline_writes (
    group_id   int NOT NULL REFERENCES custody.pipelines ON DELETE CASCADE,
    claim      bigint NOT NULL,
    epoch      bigint NOT NULL,            -- of the driver that wrote it
    token      text NOT NULL,              -- of the time that it was written: the last one counts
    sinks      text[] NOT NULL,            -- those that have something to show after the commit
    committed  boolean NOT NULL,           -- with the claim: it has to be shown
    PRIMARY KEY (group_id, claim)
);
