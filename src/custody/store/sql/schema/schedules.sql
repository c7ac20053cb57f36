-- Schedules: each publishes a message, a tick, to its topic at its times.

-- Few rows, and no index but the name's: a tick is a HOT update, and the table stays small.
CREATE TABLE custody.schedules (
    name           text PRIMARY KEY CHECK (name ~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$'),
    revision       bigint NOT NULL DEFAULT 0,     -- counts changes and ticks: whoever read an older one changes nothing

    -- A name and no reference: a schedule outlives its topic, and says that it cannot publish.
    topic          text NOT NULL CHECK (topic ~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$'),
    every          interval CHECK (every BETWEEN '1 s' AND '36500 days'),
    cron           text CHECK (length(cron) BETWEEN 1 AND 1000),
    tz             text NOT NULL CHECK (length(tz) BETWEEN 1 AND 200),      -- of the cron expression
    missed         text NOT NULL CHECK (missed IN ('skip', 'catch_up')),
    key            text,
    kind           "char" NOT NULL,
    payload        bytea NOT NULL,
    headers        jsonb,
    declared       json NOT NULL,                 -- the settings that a program gave last; an operator may change them

    app            text CHECK (length(app) BETWEEN 1 AND 200),              -- the app that declares it
    attended_until timestamptz,                   -- by then a process of the app will have said that it still runs

    next_at        timestamptz NOT NULL,
    last_at        timestamptz,                   -- the time of the last tick; not when it was published
    paused_at      timestamptz,
    paused_reason  text CHECK (paused_reason IS NULL OR paused_at IS NOT NULL),
    failed_at      timestamptz,
    last_error     text CHECK ((last_error IS NULL) = (failed_at IS NULL)),
    created_at     timestamptz NOT NULL,
    CHECK ((every IS NULL) <> (cron IS NULL)),
    CONSTRAINT message_form CHECK (kind IN ('j', 't') AND jsonb_typeof(headers) = 'object'),
    CONSTRAINT key_length CHECK (octet_length(key) <= 2000)
);
