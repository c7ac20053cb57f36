-- Keys of events are as long as keys of messages, which they become. That is checked where an event is written (the trigger outbox_begins):
-- a constraint would be checked by each move of the longer ones, too, that were there before.

ALTER TABLE custody.outbox DROP CONSTRAINT IF EXISTS key_length;
