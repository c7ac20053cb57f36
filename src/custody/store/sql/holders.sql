-- The oldest transactions that hold locks on tables or views of the schema.
SELECT a.pid, coalesce(nullif(a.application_name, ''), a.usename), a.xact_start, a.state
FROM pg_stat_activity a
WHERE a.pid <> pg_backend_pid() AND a.xact_start IS NOT NULL AND EXISTS (
    SELECT FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
    WHERE l.pid = a.pid AND l.granted AND c.relnamespace = to_regnamespace('custody')
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()))
ORDER BY a.xact_start LIMIT 3
