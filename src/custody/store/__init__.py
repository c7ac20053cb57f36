"""Where messages and their lifecycle are kept: PostgreSQL, reached by URL or embedded."""
