-- The outbox. It stands on nothing else of the schema, and a database may have it alone (`custody outbox install`) and all of
-- Custody later: hence IF NOT EXISTS.

CREATE TABLE IF NOT EXISTS custody.outbox (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id      uuid NOT NULL UNIQUE,
    event_type    text NOT NULL CHECK (event_type <> ''),
    destination   text NOT NULL DEFAULT '',       -- '': the relay's default publisher
    kind          "char" NOT NULL CHECK (kind IN ('j', 't', 'b')),
    payload       bytea NOT NULL,
    headers       jsonb CHECK (jsonb_typeof(headers) = 'object'),
    partition_key text,
    ordering_key  text,
    created_at    timestamptz NOT NULL,
    topic_id      int,                            -- where it goes if its destination is a topic of this database
    partition     int,
    status        text NOT NULL DEFAULT 'PENDING' CHECK (status IN ('PENDING', 'CLAIMED', 'PUBLISHED', 'DEAD')),
    attempts      int NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    failures      int NOT NULL DEFAULT 0 CHECK (failures BETWEEN 0 AND attempts),   -- attempts that failed, but for outages and expiries
    available_at  timestamptz NOT NULL,
    claimed_at    timestamptz CHECK ((claimed_at IS NOT NULL) = (status = 'CLAIMED')),
    claimed_by    text CHECK ((claimed_by IS NOT NULL) = (status = 'CLAIMED')),
    expires_at    timestamptz CHECK ((expires_at IS NOT NULL) = (status = 'CLAIMED')),
    claimed_with  int CHECK (claimed_with > 0),   -- how many events this claim took, this one included
    suspect       int CHECK (suspect > 0),        -- its last claim expired: so many such events, at most, are claimed together
    crashes       int NOT NULL DEFAULT 0,         -- how many claims expired of which this was the only event
    published_at  timestamptz CHECK ((published_at IS NOT NULL) = (status = 'PUBLISHED')),
    updated_at    timestamptz NOT NULL,
    last_error    text,
    replays       int NOT NULL DEFAULT 0 CHECK (replays >= 0),    -- how often it was sent again after it had been published
    replayed_at   timestamptz,
    releases      int NOT NULL DEFAULT 0,         -- how often a claim gave it back without an attempt
    CHECK ((topic_id IS NULL) = (partition IS NULL)),
    -- others no client can read, and a claim that never expires would be held for ever
    CONSTRAINT outbox_times_in_years_1_to_9999 CHECK (
        least(created_at, available_at, updated_at, claimed_at, expires_at, published_at, replayed_at) >= '0001-01-01Z'
        AND greatest(created_at, available_at, updated_at, claimed_at, expires_at, published_at, replayed_at) < '10000-01-01Z')
);

-- What operators did: replay, prune, kill.
CREATE TABLE IF NOT EXISTS custody.outbox_audit (
    entry   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL,
    actor   text,
    action  text NOT NULL CHECK (action IN ('replay', 'prune', 'kill')),
    reason  text,
    chosen  jsonb NOT NULL,        -- by what the events were chosen
    events  bigint NOT NULL,
    ids     bigint[]               -- which they were; null where they are gone
);

-- Events that relays of other databases have brought here: what makes a repeated delivery leave one message. An id is only known
-- within its topic and its source: nobody can make the event of another one vanish by bringing its id first.
CREATE TABLE IF NOT EXISTS custody.outbox_received (
    topic_id    int NOT NULL,
    source      text NOT NULL,            -- who has brought it: over HTTP the name of the API key, and what it says itself
    event_id    uuid NOT NULL,
    replay      int NOT NULL,
    received_at timestamptz NOT NULL,
    PRIMARY KEY (topic_id, source, event_id, replay)
);
CREATE INDEX IF NOT EXISTS outbox_received_by_time ON custody.outbox_received USING brin (received_at);
