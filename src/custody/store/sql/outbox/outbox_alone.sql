-- In an outbox alone no destination is a topic: the relay serves all of them.

CREATE FUNCTION custody.outbox_route(p_destination text, p_key text, OUT topic_id int, OUT partition int)
LANGUAGE sql STABLE AS $$
    SELECT NULL::int, NULL::int
$$;

CREATE FUNCTION custody.outbox_routed(p_destination text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT true
$$;
