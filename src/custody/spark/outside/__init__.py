"""Sinks outside of the database: staged before a commit and shown after it."""
