-- What a database has of Custody. custody.migrate reads these tables before it changes anything.

CREATE TABLE custody.migrations (
    version    int PRIMARY KEY,
    name       text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- One row: the functions and views that were applied last.
CREATE TABLE custody.release (
    release    int NOT NULL,
    digest     text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
