"""What drives a pipeline: its query, its claims, the job of each batch, and its commit."""
