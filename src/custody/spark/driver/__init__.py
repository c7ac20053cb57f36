"""The driver of a pipeline: its query, its claims, the jobs of each batch, and the commit."""
