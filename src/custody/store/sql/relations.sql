-- The tables, views and sequences of the schema; no indexes. A sequence of an identity column needs no grant.
SELECT relname::text, relkind::text FROM pg_class
WHERE relnamespace = 'custody'::regnamespace AND relkind IN ('r', 'p', 'v', 'S')
ORDER BY relname
