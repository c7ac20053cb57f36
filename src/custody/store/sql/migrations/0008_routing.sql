-- Routing: which messages of the log a group is bound to. See routing.sql.

-- bindings: as the user has given them; null: every message. matcher: the same, compiled for the reading of the log.
ALTER TABLE custody.groups
    ADD COLUMN bindings   jsonb CHECK (NOT bare OR bindings IS NULL),
    ADD COLUMN matcher    jsonb CHECK ((matcher IS NULL) = (bindings IS NULL)),
    ADD COLUMN binding_no int NOT NULL DEFAULT 0;

-- Which binding holds for whoever has this lock: a claim that read its group before it was bound anew notices here.
ALTER TABLE custody.cursors ADD COLUMN binding_no int NOT NULL DEFAULT 0;

-- Came back by a rewind, and nobody has looked since which of these messages the group is bound to.
ALTER TABLE custody.returned ADD COLUMN rewound boolean NOT NULL DEFAULT false;
UPDATE custody.returned SET rewound = true WHERE attempts = 0;

ALTER TABLE custody.journal DROP CONSTRAINT journal_kind_check;
ALTER TABLE custody.journal ADD CONSTRAINT journal_kind_check CHECK (kind IN (
    'start', 'claim', 'pass', 'ack', 'nack', 'dead', 'later', 'release', 'expire', 'extend', 'park',
    'redrive', 'rewind', 'skip', 'free', 'discard', 'pause', 'resume', 'policy', 'commit', 'breaker', 'replay')) NOT VALID;
