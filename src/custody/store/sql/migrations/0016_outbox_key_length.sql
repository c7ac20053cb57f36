-- As in the log, where these keys become keys of messages.

ALTER TABLE custody.outbox DROP CONSTRAINT IF EXISTS key_length;
ALTER TABLE custody.outbox ADD CONSTRAINT key_length
    CHECK (octet_length(partition_key) <= 2000 AND octet_length(ordering_key) <= 2000) NOT VALID;
