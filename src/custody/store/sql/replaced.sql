-- What a migration locks to replace functions and views: the ledger, the views, and tables whose triggers call
-- functions.
SELECT c.relname::text FROM pg_class c
WHERE c.relnamespace = to_regnamespace('custody')
  AND (c.relkind = 'v' OR c.relname = 'release' AND c.relkind = 'r'
       OR c.relkind = 'r' AND EXISTS (
           SELECT FROM pg_trigger t JOIN pg_proc f ON f.oid = t.tgfoid
           WHERE t.tgrelid = c.oid AND f.pronamespace = c.relnamespace AND NOT t.tgisinternal))
ORDER BY c.relkind, c.relname
