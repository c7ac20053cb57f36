"""`format("custody")` for plain Spark: the log and the views to read, and a sink to write to."""
