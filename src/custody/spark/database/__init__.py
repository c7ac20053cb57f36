"""Spark's access to the database. Nothing here imports PySpark."""
