-- What a database has of Custody. custody.migrate reads these tables before it changes anything.

CREATE TABLE custody.migrations (
    version    int PRIMARY KEY,
    name       text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- The roles of the database that `custody grants` gave rights to. A migration gives them the rights of its release.
CREATE TABLE custody.granted (
    grantee    name PRIMARY KEY,
    role       text NOT NULL CHECK (role IN ('readonly', 'producer', 'app', 'worker', 'operator')),
    granted_at timestamptz NOT NULL DEFAULT now()
);

-- One row: the functions and views that were applied last.
CREATE TABLE custody.release (
    release    int NOT NULL,
    oldest     int NOT NULL,               -- the oldest release whose code these functions serve
    digest     text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
