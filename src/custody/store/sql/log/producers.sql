-- Idempotent producers. A sequence counts the messages of a producer over all topics. A repeat returns the first
-- receipts.

CREATE FUNCTION custody.producer_bucket(p_producer text) RETURNS int
LANGUAGE sql IMMUTABLE AS $$ SELECT get_byte(sha256(convert_to(p_producer, 'UTF8')), 0) $$;

CREATE FUNCTION custody.init_producer(p_producer text, p_now timestamptz DEFAULT NULL) RETURNS custody.producers
LANGUAGE plpgsql AS $$
DECLARE
    v_producer custody.producers;
    v_epoch    int;
BEGIN
    PERFORM custody.require_read_committed();
    IF coalesce(p_producer, '') = '' THEN
        PERFORM custody.refuse('invalid_argument', 'a producer needs an id',
            'Give a name that survives restarts of the service.');
    END IF;
    INSERT INTO custody.producers AS p (producer_id, epoch, updated_at)
    VALUES (p_producer, 1, coalesce(p_now, clock_timestamp()))
    ON CONFLICT (producer_id) DO UPDATE
        SET epoch = p.epoch + 1, last_sequence = -1, updated_at = excluded.updated_at
    RETURNING * INTO v_producer;
    IF v_producer.epoch = 1 THEN
        -- The producer may have been forgotten before. This is a second statement, because the insert may have waited
        -- for whoever forgot it.
        UPDATE custody.producers p SET epoch = f.highest + 1 FROM custody.forgotten_producers f
        WHERE p.producer_id = p_producer AND f.bucket = custody.producer_bucket(p_producer)
        RETURNING p.epoch INTO v_epoch;
        v_producer.epoch := coalesce(v_epoch, 1);
    END IF;
    DELETE FROM custody.producer_receipts WHERE producer_id = p_producer;
    RETURN v_producer;
END $$;

-- Locks the producer, refuses calls that are fenced or out of sequence, and returns the receipts of the messages that
-- it has sent before: a prefix of the batch, often empty.
CREATE FUNCTION custody.known_receipts(
    p_topic text, p_producer text, p_epoch int, p_sequence bigint, p_count int, p_delayed boolean DEFAULT false
) RETURNS TABLE (partition int, "offset" bigint, duplicate boolean, deliver_at timestamptz)
LANGUAGE plpgsql AS $$
DECLARE
    v_producer custody.producers;
    v_known    bigint;
    v_found    bigint;
BEGIN
    PERFORM custody.require_read_committed();
    IF p_epoch IS NULL OR p_sequence IS NULL OR p_sequence < 0 THEN
        PERFORM custody.refuse('invalid_argument', 'an idempotent publish needs an epoch and a sequence from 0 on');
    END IF;
    SELECT * INTO v_producer FROM custody.producers WHERE producer_id = p_producer FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM custody.refuse('producer_not_found', format('there is no producer %L', p_producer),
            'Initialise it first (init_producer).');
    ELSIF v_producer.epoch <> p_epoch THEN
        PERFORM custody.refuse('producer_fenced',
            format('producer %L is at epoch %s, not %s', p_producer, v_producer.epoch, p_epoch),
            'A newer instance has taken over: stop this one, or initialise the producer again.');
    ELSIF p_sequence > v_producer.last_sequence + 1 THEN
        PERFORM custody.refuse('sequence_conflict',
            format('producer %L: sequence %s leaves a gap after %s', p_producer, p_sequence, v_producer.last_sequence),
            format('The next sequence is %s.', v_producer.last_sequence + 1));
    END IF;
    v_known := least(v_producer.last_sequence + 1 - p_sequence, p_count);
    IF EXISTS (SELECT FROM custody.producer_receipts r
               WHERE r.producer_id = p_producer AND r.epoch = p_epoch AND r.last_sequence >= p_sequence
                 AND r.first_sequence < p_sequence + v_known
                 AND r.topic_id <> (custody.topic_named(p_topic)).topic_id) THEN
        PERFORM custody.refuse('sequence_conflict',
            format('producer %L: sequence %s was used for another topic than %L', p_producer, p_sequence, p_topic),
            format('The sequence counts over all topics. The next one is %s.', v_producer.last_sequence + 1));
    ELSIF EXISTS (SELECT FROM custody.producer_receipts r
                  WHERE r.producer_id = p_producer AND r.epoch = p_epoch AND r.last_sequence >= p_sequence
                    AND r.first_sequence < p_sequence + v_known AND (r.deliver_at IS NOT NULL) <> p_delayed) THEN
        PERFORM custody.refuse('sequence_conflict',
            format('producer %L: sequence %s was used for a message %s a delay', p_producer, p_sequence,
                   CASE WHEN p_delayed THEN 'without' ELSE 'with' END),
            'Repeat a publish as it was.');
    END IF;
    RETURN QUERY
    SELECT x.p, x.o, true, x.t
    FROM custody.producer_receipts r, unnest(r.partitions, r.offsets, r.deliver_at) WITH ORDINALITY x (p, o, t, n)
    WHERE r.producer_id = p_producer AND r.epoch = p_epoch AND r.last_sequence >= p_sequence
      AND r.first_sequence < p_sequence + v_known
      AND r.first_sequence + x.n - 1 BETWEEN p_sequence AND p_sequence + v_known - 1
    ORDER BY r.first_sequence + x.n;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    IF v_found < v_known THEN
        PERFORM custody.refuse('sequence_conflict',
            format('producer %L: sequence %s is older than what is remembered', p_producer, p_sequence),
            'Only the last 1,000 messages can be repeated. It was published before: do not send it again.');
    END IF;
END $$;

CREATE FUNCTION custody.remember_receipts(
    p_topic text, p_producer text, p_epoch int, p_sequence bigint, p_partitions int[], p_offsets bigint[],
    p_now timestamptz, p_deliver_at timestamptz[] DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_last bigint := p_sequence + cardinality(p_offsets) - 1;
BEGIN
    UPDATE custody.producers SET last_sequence = v_last, updated_at = coalesce(p_now, clock_timestamp())
    WHERE producer_id = p_producer;
    INSERT INTO custody.producer_receipts
    VALUES (p_producer, p_epoch, p_sequence, v_last, (custody.topic_named(p_topic)).topic_id, p_partitions, p_offsets,
            p_deliver_at);
    DELETE FROM custody.producer_receipts
    WHERE producer_id = p_producer AND epoch = p_epoch AND last_sequence < v_last - 1000;
END $$;

-- The state of a producer, for a caller that lost the answer of a publish.
CREATE FUNCTION custody.producer_state(p_producer text)
RETURNS TABLE (producer_id text, epoch int, last_sequence bigint, topic text, partition int, "offset" bigint,
               deliver_at timestamptz)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY
    SELECT p.producer_id, p.epoch, p.last_sequence, t.name, r.partitions[cardinality(r.partitions)],
           r.offsets[cardinality(r.offsets)], r.deliver_at[cardinality(r.deliver_at)]
    FROM custody.producers p
    LEFT JOIN custody.producer_receipts r USING (producer_id, epoch, last_sequence)
    LEFT JOIN custody.topics t USING (topic_id)
    WHERE p.producer_id = p_producer;
    IF NOT FOUND THEN
        PERFORM custody.refuse('producer_not_found', format('there is no producer %L', p_producer),
            'Initialise it first (init_producer).');
    END IF;
END $$;

-- Forgets a producer that will not come back. Its receipts are deleted, so its messages cannot be repeated any more.
-- Its epoch is remembered: if it does come back, it gets a higher one. With p_epoch only that instance is forgotten.
-- Returns false if there is no producer of that name.
CREATE FUNCTION custody.forget_producer(p_producer text, p_epoch int DEFAULT NULL, p_now timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_producer custody.producers;
BEGIN
    PERFORM custody.require_read_committed();
    SELECT * INTO v_producer FROM custody.producers WHERE producer_id = p_producer FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF v_producer.epoch <> p_epoch THEN
        PERFORM custody.refuse('producer_fenced',
            format('producer %L is at epoch %s, not %s', p_producer, v_producer.epoch, p_epoch),
            'A newer instance has taken over: it is not this one''s to forget.');
    ELSIF EXISTS (SELECT FROM custody.transactions t
                  WHERE t.producer_id = p_producer AND t.epoch = v_producer.epoch AND t.state = 'open'
                    AND t.expires_at > coalesce(p_now, clock_timestamp())) THEN
        PERFORM custody.refuse('producer_in_use', format('producer %L has an open transaction', p_producer),
            'Commit or abort it first.');
    END IF;
    INSERT INTO custody.forgotten_producers AS f VALUES (custody.producer_bucket(p_producer), v_producer.epoch)
    ON CONFLICT (bucket) DO UPDATE SET highest = excluded.highest WHERE f.highest < excluded.highest;
    DELETE FROM custody.producers WHERE producer_id = p_producer;
    RETURN true;
END $$;
