-- Priorities and fairness: see priorities.sql and fairness.sql.

-- With a limit the topic has priorities: each of its partitions is five in the log, a lane for each priority.
ALTER TABLE custody.topics
    ADD COLUMN starvation_limit interval CHECK (starvation_limit > '0'),
    ADD CHECK (starvation_limit IS NULL OR partitions % 5 = 0);

ALTER TABLE custody.groups
    ADD COLUMN fairness text CHECK (fairness IN ('key', 'tenant')),
    ADD COLUMN tenant_separator text NOT NULL DEFAULT ':' CHECK (tenant_separator <> ''),
    ADD CHECK (fairness IS NULL OR ordering = 'key');

-- Of a group with fairness: the tenant of the key (all keys have the same one if the group is fair by key), and when the key
-- had its turn. Null in every other group, and where a group was one of those a moment ago: so the index has these too.
ALTER TABLE custody.awaited ADD COLUMN tenant text, ADD COLUMN turn xid8, ADD CHECK ((tenant IS NULL) = (turn IS NULL));
CREATE INDEX awaited_turns ON custody.awaited (group_id, partition, tenant, turn);
CREATE INDEX awaited_longest ON custody.awaited (group_id, partition, turn) WHERE tenant IS NOT NULL;
