"""What the tasks of a pipeline do in executors: read, handle, stage and report; and what the driver tells them."""
