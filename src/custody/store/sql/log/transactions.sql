-- Transactions. Messages that a producer adds wait in tables of their own. The commit publishes them and acknowledges
-- what was consumed, in one transaction of the database: no reader sees them before, and an abort leaves no gap. A
-- timeout is a rule, not a process. Locks: transaction → producer → lease → head.

CREATE FUNCTION custody.begin_transaction(
    p_producer text, p_epoch int DEFAULT NULL, p_timeout interval DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS custody.transactions
LANGUAGE plpgsql AS $$
DECLARE
    v_now         timestamptz;
    v_producer    custody.producers;
    v_transaction custody.transactions;
BEGIN
    PERFORM custody.require_read_committed();
    IF p_timeout <= '0' OR p_timeout > '1 day' THEN
        PERFORM custody.refuse('invalid_argument',
            'the timeout of a transaction is more than nothing and at most a day');
    END IF;
    PERFORM custody.clear_transactions(p_now);
    v_producer := custody.require_epoch(p_producer, p_epoch);
    v_now := coalesce(p_now, clock_timestamp());      -- after the wait for the producer: the timeout begins now
    INSERT INTO custody.transactions (producer_id, epoch, begun_at, expires_at)
    VALUES (p_producer, v_producer.epoch, v_now, v_now + coalesce(p_timeout, '60 s'))
    RETURNING * INTO v_transaction;
    RETURN v_transaction;
END $$;

-- The producer, if this is its epoch. No other instance takes over before the caller commits.
CREATE FUNCTION custody.require_epoch(p_producer text, p_epoch int) RETURNS custody.producers
LANGUAGE plpgsql AS $$
DECLARE
    v_producer custody.producers;
BEGIN
    SELECT * INTO v_producer FROM custody.producers WHERE producer_id = p_producer FOR SHARE;
    IF NOT FOUND THEN
        PERFORM custody.refuse('producer_not_found', format('there is no producer %L', p_producer),
            'Initialise it first (init_producer).');
    ELSIF v_producer.epoch <> p_epoch THEN
        PERFORM custody.refuse('producer_fenced',
            format('producer %L is at epoch %s, not %s', p_producer, v_producer.epoch, p_epoch),
            'A newer instance has taken over: stop this one, or initialise the producer again.');
    END IF;
    RETURN v_producer;
END $$;

-- Deletes transactions that nobody can commit any more, and receipts after a day. It deletes a few at a time: whoever
-- begins a transaction calls it, and upkeep calls it until it returns 0.
CREATE FUNCTION custody.clear_transactions(p_now timestamptz DEFAULT NULL) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    v_old     uuid;
    v_timed   int := 0;
    v_cleared int;
BEGIN
    p_now := coalesce(p_now, clock_timestamp());
    FOR v_old IN
        SELECT transaction_id FROM custody.transactions WHERE state = 'open' AND expires_at <= p_now
        ORDER BY expires_at LIMIT 10 FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM custody.end_transaction(v_old, 'aborted', 'it timed out', p_now);
        v_timed := v_timed + 1;
    END LOOP;
    DELETE FROM custody.transactions WHERE transaction_id IN (
        SELECT transaction_id FROM custody.transactions WHERE state <> 'open' AND ended_at < p_now - interval '1 day'
        ORDER BY ended_at LIMIT 100 FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_cleared = ROW_COUNT;
    RETURN v_timed + v_cleared;
END $$;

CREATE FUNCTION custody.end_transaction(p_transaction uuid, p_state text, p_reason text, p_now timestamptz) RETURNS void
LANGUAGE sql AS $$
    DELETE FROM custody.transaction_messages WHERE transaction_id = p_transaction;
    DELETE FROM custody.transaction_acks WHERE transaction_id = p_transaction;
    UPDATE custody.transactions SET state = p_state, reason = p_reason, ended_at = p_now
    WHERE transaction_id = p_transaction
$$;

CREATE FUNCTION custody.lock_transaction(p_transaction uuid) RETURNS custody.transactions
LANGUAGE plpgsql AS $$
DECLARE
    v_transaction custody.transactions;
BEGIN
    PERFORM custody.require_read_committed();
    SELECT * INTO v_transaction FROM custody.transactions WHERE transaction_id = p_transaction FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM custody.refuse('transaction_not_found', format('there is no transaction %s', p_transaction),
            'Begin one; an ended one is remembered for a day.');
    END IF;
    RETURN v_transaction;
END $$;

-- Open, in time, and of the current epoch of the producer.
CREATE FUNCTION custody.require_open(p_transaction custody.transactions, p_now timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF (p_transaction).state <> 'open' THEN
        PERFORM custody.refuse('transaction_over',
            format('the transaction was %s%s', (p_transaction).state, coalesce(': ' || (p_transaction).reason, '')),
            'Nothing of it can be changed: begin another one.');
    ELSIF p_now >= (p_transaction).expires_at THEN
        PERFORM custody.refuse('transaction_over', 'the transaction was aborted: it timed out',
            'Nothing of it was published. Begin another one, with a longer timeout if need be.');
    END IF;
    PERFORM custody.require_epoch((p_transaction).producer_id, (p_transaction).epoch);
END $$;

-- Adds messages, which nobody sees yet. p_first is the number of the first one, counted from 0. Messages that were
-- added before under the same number are not added again, so a call whose answer was lost can be repeated. Returns how
-- many messages there are now.
CREATE FUNCTION custody.add_to_transaction(
    p_transaction uuid, p_first int, p_topic text, p_partitions int[], p_named boolean[], p_of int, p_keys text[],
    p_kinds text[], p_payloads bytea[], p_headers text[], p_deliver_at timestamptz[], p_delays double precision[],
    p_now timestamptz DEFAULT NULL
) RETURNS int
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_transaction custody.transactions := custody.lock_transaction(p_transaction);
    v_topic       custody.topics := custody.topic_named(p_topic);
    v_count       int;
BEGIN
    PERFORM custody.require_open(v_transaction, coalesce(p_now, clock_timestamp()));
    PERFORM custody.require_partition(v_topic, p) FROM unnest(p_partitions) p;
    IF p_of <> v_topic.partitions THEN
        PERFORM custody.refuse('topic_changed',
            format('topic %L has %s partitions now, not %s', p_topic, v_topic.partitions, p_of),
            'Place the messages anew.');
    END IF;
    SELECT coalesce(max(n) + 1, 0) INTO v_count FROM custody.transaction_messages WHERE transaction_id = p_transaction;
    p_first := coalesce(p_first, v_count);
    IF p_first > v_count THEN
        PERFORM custody.refuse('sequence_conflict',
            format('message %s of the transaction leaves a gap: it has %s', p_first, v_count),
            format('The next one is %s.', v_count));
    END IF;
    INSERT INTO custody.transaction_messages (
        transaction_id, n, topic_id, partition, placed_of, key, kind, payload, headers, deliver_at, delay)
    SELECT p_transaction, p_first + m.n - 1, v_topic.topic_id, m.partition,
           CASE WHEN NOT m.named THEN v_topic.partitions END, m.key, m.kind::"char", m.payload, m.headers::jsonb,
           m.deliver_at, make_interval(secs => m.delay)
    FROM unnest(p_partitions, p_named, p_keys, p_kinds, p_payloads, p_headers, p_deliver_at, p_delays)
         WITH ORDINALITY m (partition, named, key, kind, payload, headers, deliver_at, delay, n)
    WHERE p_first + m.n - 1 >= v_count;
    RETURN greatest(v_count, p_first + cardinality(p_payloads));
END $$;

-- Adds acks: the commit settles these offsets of a lease, or all that its holder has not settled. If the lease has lost
-- any of them by then, the commit is refused, because somebody else publishes what follows from them. This does not
-- extend the lease.
CREATE FUNCTION custody.ack_in_transaction(
    p_transaction uuid, p_lease_id uuid, p_offsets bigint[] DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_transaction custody.transactions := custody.lock_transaction(p_transaction);
    v_now         timestamptz := coalesce(p_now, clock_timestamp());
    v_set         int8multirange := custody.offsets_set(p_offsets);
    v_meant       record;
BEGIN
    PERFORM custody.require_open(v_transaction, v_now);
    IF p_offsets IS NULL THEN
        v_meant := custody.meant(p_lease_id, ARRAY(SELECT l FROM custody.leases l WHERE l.lease_id = p_lease_id),
                                 v_now);
        IF isempty(v_meant.held) OR NOT isempty(v_meant.lost) THEN
            PERFORM custody.refuse_lost(p_lease_id, v_meant.lost);
        END IF;
        v_set := v_meant.held;
    END IF;
    INSERT INTO custody.transaction_acks AS a VALUES (p_transaction, p_lease_id, v_set)
    ON CONFLICT (transaction_id, lease_id) DO UPDATE SET offsets = a.offsets + excluded.offsets;
END $$;

-- Commits all or nothing. A repeat returns what the first commit did.
CREATE FUNCTION custody.commit_transaction(
    p_transaction uuid, p_worker text DEFAULT NULL, p_now timestamptz DEFAULT NULL
)
RETURNS TABLE (topic text, partition int, "offset" bigint, deliver_at timestamptz)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_transaction custody.transactions := custody.lock_transaction(p_transaction);
    v_now         timestamptz := coalesce(p_now, clock_timestamp());
    v_ack         custody.transaction_acks;
    v_topic       record;
    v_batch       record;
    v_n           int[] := '{}';
    v_topics      text[] := '{}';
    v_partitions  int[] := '{}';
    v_offsets     bigint[] := '{}';
    v_times       timestamptz[] := '{}';
BEGIN
    IF v_transaction.state <> 'committed' THEN
        PERFORM custody.require_open(v_transaction, v_now);
        FOR v_ack IN SELECT * FROM custody.transaction_acks a WHERE a.transaction_id = p_transaction
            ORDER BY a.lease_id LOOP
            PERFORM custody.settle(v_ack.lease_id, '{}', '{}', p_worker => p_worker, p_now => p_now,
                                   p_acked => v_ack.offsets, p_exact => true);
        END LOOP;
        LOOP
            PERFORM custody.place_transaction(p_transaction);
            PERFORM 1 FROM custody.heads h
            WHERE (h.topic_id, h.partition) IN (SELECT m.topic_id, m.partition FROM custody.transaction_messages m
                                                WHERE m.transaction_id = p_transaction)
            ORDER BY h.topic_id, h.partition FOR UPDATE;
            -- Under the heads the number of partitions does not change.
            EXIT WHEN NOT EXISTS (SELECT FROM custody.transaction_messages m JOIN custody.topics t USING (topic_id)
                                  WHERE m.transaction_id = p_transaction AND m.placed_of <> t.partitions);
        END LOOP;
        FOR v_topic IN
            SELECT m.topic_id, m.delay IS NOT NULL OR m.deliver_at IS NOT NULL AS waits, t.name, t.partitions AS of
            FROM custody.transaction_messages m LEFT JOIN custody.topics t USING (topic_id)
            WHERE m.transaction_id = p_transaction GROUP BY 1, 2, 3, 4 ORDER BY 1, 2
        LOOP
            IF v_topic.name IS NULL THEN
                PERFORM custody.refuse('topic_not_found',
                    'a topic to which the transaction publishes was deleted meanwhile',
                    'Nothing of the transaction was committed. Abort it.');
            END IF;
            SELECT array_agg(m.n ORDER BY m.n) AS n, array_agg(m.partition ORDER BY m.n) AS partitions,
                   array_agg(m.key ORDER BY m.n) AS keys, array_agg(m.kind::text ORDER BY m.n) AS kinds,
                   array_agg(m.payload ORDER BY m.n) AS payloads,
                   array_agg(m.headers::text ORDER BY m.n) AS headers, array_agg(m.deliver_at ORDER BY m.n) AS times,
                   array_agg(extract(epoch FROM m.delay)::double precision ORDER BY m.n) AS delays
            INTO v_batch
            FROM custody.transaction_messages m
            WHERE m.transaction_id = p_transaction AND m.topic_id = v_topic.topic_id
              AND (m.delay IS NOT NULL OR m.deliver_at IS NOT NULL) = v_topic.waits;
            v_n := v_n || v_batch.n;
            v_topics := v_topics || array_fill(v_topic.name, ARRAY[cardinality(v_batch.n)]);
            IF v_topic.waits THEN
                SELECT v_partitions || array_agg(r.partition), v_offsets || array_agg(r.delay_id),
                       v_times || array_agg(r.deliver_at)
                INTO v_partitions, v_offsets, v_times
                FROM custody.publish_delayed(v_topic.name, v_batch.partitions, v_batch.keys, v_batch.kinds,
                                             v_batch.payloads, v_batch.headers, v_batch.times, v_batch.delays,
                                             p_now => p_now, p_of => v_topic.of) r;
            ELSE
                SELECT v_partitions || array_agg(r.partition), v_offsets || array_agg(r."offset"),
                       v_times || array_agg(NULL::timestamptz)
                INTO v_partitions, v_offsets, v_times
                FROM custody.publish(v_topic.name, v_batch.partitions, v_batch.keys, v_batch.kinds, v_batch.payloads,
                                     v_batch.headers, p_now => p_now, p_of => v_topic.of) r;
            END IF;
        END LOOP;
        PERFORM custody.end_transaction(p_transaction, 'committed', NULL, v_now);
        UPDATE custody.transactions x SET (topics, partitions, offsets, deliver_at) = (
            SELECT array_agg(m.t ORDER BY m.n), array_agg(m.p ORDER BY m.n), array_agg(m.o ORDER BY m.n),
                   array_agg(m.d ORDER BY m.n)
            FROM unnest(v_n, v_topics, v_partitions, v_offsets, v_times) m (n, t, p, o, d))
        WHERE x.transaction_id = p_transaction RETURNING * INTO v_transaction;
    END IF;
    RETURN QUERY SELECT m.t, m.p, m.o, m.d
    FROM unnest(v_transaction.topics, v_transaction.partitions, v_transaction.offsets, v_transaction.deliver_at) m (t,
            p, o, d);
END $$;

-- Topics may have grown since the messages were placed.
CREATE FUNCTION custody.place_transaction(p_transaction uuid) RETURNS void
LANGUAGE sql AS $$
    UPDATE custody.transaction_messages m
    SET partition = CASE WHEN m.key IS NULL THEN m.partition
                         ELSE custody.place(t, m.key,
                                            CASE WHEN t.starvation_limit IS NOT NULL
                                                 THEN custody.lane(m.partition) END) END,
        placed_of = t.partitions
    FROM custody.topics t
    WHERE m.transaction_id = p_transaction AND t.topic_id = m.topic_id AND m.placed_of <> t.partitions
$$;

-- Aborts: nobody will ever see the messages. Returns true if the transaction was open. Aborting twice is allowed.
CREATE FUNCTION custody.abort_transaction(
    p_transaction uuid, p_reason text DEFAULT NULL, p_now timestamptz DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_transaction custody.transactions := custody.lock_transaction(p_transaction);
BEGIN
    IF v_transaction.state = 'committed' THEN
        PERFORM custody.refuse('transaction_over', 'the transaction was committed',
            'What was published stays published.');
    ELSIF v_transaction.state = 'open' THEN
        PERFORM custody.end_transaction(p_transaction, 'aborted', coalesce(p_reason, 'by its producer'),
                                        coalesce(p_now, clock_timestamp()));
    END IF;
    RETURN v_transaction.state = 'open';
END $$;

-- Open transactions and what they hold. One past its timeout is shown as aborted, even if it was not deleted yet.
CREATE FUNCTION custody.open_transactions(p_now timestamptz DEFAULT NULL)
RETURNS TABLE (transaction_id uuid, producer_id text, epoch int, begun_at timestamptz, expires_at timestamptz,
               messages bigint, acks bigint)
LANGUAGE sql STABLE AS $$
    SELECT t.transaction_id, t.producer_id, t.epoch, t.begun_at, t.expires_at,
           (SELECT count(*) FROM custody.transaction_messages m WHERE m.transaction_id = t.transaction_id),
           (SELECT count(*) FROM custody.transaction_acks a WHERE a.transaction_id = t.transaction_id)
    FROM custody.transactions t
    WHERE t.state = 'open' AND t.expires_at > coalesce(p_now, clock_timestamp()) ORDER BY t.begun_at, t.transaction_id
$$;
