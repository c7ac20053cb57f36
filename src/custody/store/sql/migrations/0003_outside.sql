-- What pipelines have written to sinks outside of the database and not finished: see outside.sql.
CREATE TABLE custody.pipeline_writes (
    group_id   int NOT NULL REFERENCES custody.pipelines ON DELETE CASCADE,
    claim      bigint NOT NULL,
    epoch      bigint NOT NULL,            -- of the driver that wrote it
    sinks      text[] NOT NULL,
    committed  boolean NOT NULL,           -- with the claim: it has to be shown
    PRIMARY KEY (group_id, claim)
);
