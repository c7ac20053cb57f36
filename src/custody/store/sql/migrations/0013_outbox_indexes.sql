-- A claim must not cost an entry in every index: it changes nothing that an index has, and there is room for it on the page, though the
-- claimed row is longer than the pending one (a HOT update). So no index has the status, the claim or updated_at; whether an event is
-- open is in a column that changes when it ends.

ALTER TABLE custody.outbox ADD COLUMN IF NOT EXISTS ended_at timestamptz
    GENERATED ALWAYS AS (CASE WHEN status IN ('PUBLISHED', 'DEAD') THEN updated_at END) STORED;
ALTER TABLE custody.outbox SET (fillfactor = 40);

DROP INDEX IF EXISTS custody.outbox_pending, custody.outbox_for_topic, custody.outbox_for_topic_due, custody.outbox_by_key,
    custody.outbox_claimed, custody.outbox_finished;
CREATE INDEX IF NOT EXISTS outbox_open ON custody.outbox (topic_id, id) WHERE ended_at IS NULL AND topic_id IS NULL;
CREATE INDEX IF NOT EXISTS outbox_open_for_topic ON custody.outbox (topic_id, partition, id) WHERE ended_at IS NULL AND topic_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS outbox_due_for_topic ON custody.outbox (topic_id, partition, available_at)
    WHERE ended_at IS NULL AND topic_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS outbox_unpublished_by_key ON custody.outbox (ordering_key, destination, id)
    WHERE ordering_key IS NOT NULL AND published_at IS NULL;
CREATE INDEX IF NOT EXISTS outbox_published ON custody.outbox (ended_at) WHERE published_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS outbox_dead ON custody.outbox (ended_at) WHERE ended_at IS NOT NULL AND published_at IS NULL;
