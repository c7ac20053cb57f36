"""What a pipeline runs in: a Java, a session, and executors that have what they need."""
