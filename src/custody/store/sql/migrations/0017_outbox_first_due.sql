-- What the age of an event is counted from if it was written for later: available_at moves with each retry.

ALTER TABLE custody.outbox ADD COLUMN IF NOT EXISTS first_due timestamptz;
UPDATE custody.outbox SET first_due = available_at
WHERE ended_at IS NULL AND first_due IS NULL AND attempts = 0 AND available_at > created_at;

-- Forgetting which events have come leaves a record, too.
ALTER TABLE custody.outbox_audit DROP CONSTRAINT IF EXISTS outbox_audit_action_check;
ALTER TABLE custody.outbox_audit ADD CONSTRAINT outbox_audit_action_check CHECK (action IN ('replay', 'prune', 'kill', 'forget'));
