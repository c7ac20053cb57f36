"""Sinks outside of the database: results are staged before a commit and made visible after it."""
