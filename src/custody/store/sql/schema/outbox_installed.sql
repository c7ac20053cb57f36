-- The ledger of an outbox that was installed alone: one row.

CREATE TABLE custody.outbox_installed (
    version int NOT NULL,
    release int NOT NULL,
    oldest  int NOT NULL,                  -- as in custody.release
    digest  text NOT NULL,
    at      timestamptz NOT NULL DEFAULT now()
);
