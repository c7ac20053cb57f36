-- For the HTTP door. See together.sql.

-- Nobody else has had these messages before: a settle that names neither lease nor receipt cannot mean another delivery.
ALTER TABLE custody.leases ADD COLUMN fresh boolean NOT NULL DEFAULT false;
