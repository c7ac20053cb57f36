-- What remains of forgotten producers: the highest epoch that any of them had, so that one that comes back still fences its old
-- instances. Not one row for each, of which there is no end: they share a few, by the first byte of the hash of their names.

CREATE TABLE custody.forgotten_producers (
    bucket  int PRIMARY KEY,
    highest int NOT NULL
);
