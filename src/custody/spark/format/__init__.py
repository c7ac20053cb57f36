"""`format("custody")` for plain Spark: sources for the log and the views, and a sink."""
