"""What Spark asks of the database. Nothing here imports PySpark."""
