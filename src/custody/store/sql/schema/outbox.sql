-- The outbox. It depends on no other table: a database may have it alone (`custody outbox install`).

CREATE TABLE custody.outbox (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id      uuid NOT NULL UNIQUE,
    event_type    text NOT NULL CHECK (event_type <> ''),
    destination   text NOT NULL DEFAULT '',                -- '': the relay's default publisher
    kind          "char" NOT NULL CHECK (kind IN ('j', 't', 'b')),
    payload       bytea NOT NULL,
    headers       jsonb CHECK (jsonb_typeof(headers) = 'object'),
    partition_key text,                                    -- the trigger outbox_begins checks the length of both keys
    ordering_key  text,
    created_at    timestamptz NOT NULL,
    topic_id      int,                                     -- set if the destination is a topic of this database
    partition     int,
    status        text NOT NULL DEFAULT 'PENDING' CHECK (status IN ('PENDING', 'CLAIMED', 'PUBLISHED', 'DEAD')),
    attempts      int NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    failures      int NOT NULL DEFAULT 0 CHECK (failures BETWEEN 0 AND attempts),   -- without outages and expiries
    available_at  timestamptz NOT NULL,
    first_due     timestamptz,                             -- of an event for later: available_at moves with each retry
    claimed_at    timestamptz CHECK ((claimed_at IS NOT NULL) = (status = 'CLAIMED')),
    claimed_by    text CHECK ((claimed_by IS NOT NULL) = (status = 'CLAIMED')),
    expires_at    timestamptz CHECK ((expires_at IS NOT NULL) = (status = 'CLAIMED')),
    claimed_with  int CHECK (claimed_with > 0),            -- the number of events in this claim
    suspect       int CHECK (suspect > 0),                 -- the last claim expired: the most such events in one claim
    crashes       int NOT NULL DEFAULT 0,                  -- claims of this event alone that expired
    published_at  timestamptz CHECK ((published_at IS NOT NULL) = (status = 'PUBLISHED')),
    updated_at    timestamptz NOT NULL,
    last_error    text,
    replays       int NOT NULL DEFAULT 0 CHECK (replays >= 0),     -- how often it was sent again after it was published
    replayed_at   timestamptz,
    releases      int NOT NULL DEFAULT 0,                  -- how often a claim gave it back without an attempt
    ended_at      timestamptz
        GENERATED ALWAYS AS (CASE WHEN status IN ('PUBLISHED', 'DEAD') THEN updated_at END) STORED,
    CHECK ((topic_id IS NULL) = (partition IS NULL)),
    -- Clients cannot read other times, and a claim until 'infinity' would never expire.
    CONSTRAINT outbox_times_in_years_1_to_9999 CHECK (
        least(created_at, available_at, updated_at, claimed_at, expires_at, published_at, replayed_at)
            >= '0001-01-01Z'
        AND greatest(created_at, available_at, updated_at, claimed_at, expires_at, published_at, replayed_at)
            < '10000-01-01Z')
)
-- A claim should be a HOT update, which writes to no index. So no index has a column that a claim changes (the status,
-- the claim, updated_at): whether an event is open is in ended_at. And a page has room for the claimed row, which is
-- longer.
WITH (fillfactor = 40);

CREATE INDEX outbox_open ON custody.outbox (topic_id, id) WHERE ended_at IS NULL AND topic_id IS NULL;
CREATE INDEX outbox_open_for_topic ON custody.outbox (topic_id, partition, id)
    WHERE ended_at IS NULL AND topic_id IS NOT NULL;
CREATE INDEX outbox_due_for_topic ON custody.outbox (topic_id, partition, available_at)
    WHERE ended_at IS NULL AND topic_id IS NOT NULL;
CREATE INDEX outbox_unpublished_by_key ON custody.outbox (ordering_key, destination, id)
    WHERE ordering_key IS NOT NULL AND published_at IS NULL;
CREATE INDEX outbox_published ON custody.outbox (ended_at) WHERE published_at IS NOT NULL;
CREATE INDEX outbox_dead ON custody.outbox (ended_at) WHERE ended_at IS NOT NULL AND published_at IS NULL;

-- What operators did.
CREATE TABLE custody.outbox_audit (
    entry  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at     timestamptz NOT NULL,
    actor  text,
    action text NOT NULL CHECK (action IN ('replay', 'prune', 'kill', 'forget')),
    reason text,
    chosen jsonb NOT NULL,                 -- how the events were chosen
    events bigint NOT NULL,
    ids    bigint[]                        -- null if the events are gone
);

-- Events that relays of other databases have brought, so that a repeated delivery leaves one message. An id counts
-- within its topic and source only: nobody can suppress the event of another source by bringing its id first.
CREATE TABLE custody.outbox_received (
    topic_id    int NOT NULL,
    source      text NOT NULL,             -- over HTTP: the name of the API key, and the name that the caller gives
    event_id    uuid NOT NULL,
    replay      int NOT NULL,
    received_at timestamptz NOT NULL,
    PRIMARY KEY (topic_id, source, event_id, replay)
);
CREATE INDEX outbox_received_by_time ON custody.outbox_received USING brin (received_at);
