"""PostgreSQL, by URL or embedded: connections, calls of SQL functions, COPY, Arrow, migrations."""
