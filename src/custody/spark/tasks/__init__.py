"""The tasks of a pipeline, which run in executors: read, handle, stage and report; and their job description."""
