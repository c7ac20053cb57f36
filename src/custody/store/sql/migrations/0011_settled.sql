-- Messages that left a lease because its holder settled them. Over all rows of a lease this and `remaining` add up to its size,
-- unless some of it was lost: rewound, or expired. So a settle of the whole lease notices a loss without reading the journal.
ALTER TABLE custody.leases ADD COLUMN settled int NOT NULL DEFAULT 0;
