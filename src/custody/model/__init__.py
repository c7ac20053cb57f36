"""The pure centre: what Custody knows of messages, groups and policies. Nothing here does I/O."""
