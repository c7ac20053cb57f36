-- Asked once, when a connection is opened: what it is, and settings for its session. Behind a pooler the pid that the
-- client got at the start is not that of the backend that answers. Then nothing is set, because the next client would
-- find it.
SELECT pg_backend_pid() = %(client_pid)s,
       current_setting('default_transaction_isolation'),
       CASE WHEN pg_backend_pid() = %(client_pid)s THEN set_config('TimeZone', 'UTC', false) END,
       CASE WHEN pg_backend_pid() = %(client_pid)s THEN set_config('default_transaction_isolation', 'read committed',
                                                             false) END,
       CASE WHEN pg_backend_pid() = %(client_pid)s AND %(statement_timeout)s::text IS NOT NULL
            THEN set_config('statement_timeout', %(statement_timeout)s::text, false) END
