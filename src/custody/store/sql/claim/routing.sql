-- Routing: a group may be bound to a part of the log. The frontier passes over the other messages: they are in no
-- lease, no range and no case, so they are done, and one row of the journal has their offsets.

-- A pattern as a regular expression: `*` is one segment, `>` one or more at the end.
CREATE FUNCTION custody.pattern_expression(p_pattern text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_segments text[] := string_to_array(p_pattern, '.');
BEGIN
    IF length(p_pattern) > 1000 OR '' = ANY (v_segments) OR cardinality(v_segments) NOT BETWEEN 1 AND 32 THEN
        PERFORM custody.refuse('invalid_argument', format('%L is not a pattern', left(p_pattern, 100)),
            'Write up to 1,000 characters in up to 32 segments between dots, none of them empty; '
            '> at the end stands for all that follow.');
    ELSIF p_pattern ~ '[^.][*>]|[*>][^.]' OR '>' = ANY (v_segments[:cardinality(v_segments) - 1]) THEN
        PERFORM custody.refuse('invalid_argument', format('%L is not a pattern', p_pattern),
            '* stands for one whole segment, and > as the last segment for all that follow: '
            'orders.*.created, orders.>');
    END IF;
    RETURN (SELECT string_agg(
                CASE s WHEN '*' THEN '[^.]+' WHEN '>' THEN '[^.]+(?:[.][^.]+)*'
                       ELSE regexp_replace(s, '([\\^$|?+(){}[\]])', '\\\1', 'g') END, '[.]' ORDER BY n)
            FROM unnest(v_segments) WITH ORDINALITY x (s, n));
END $$;

-- The bindings as they are stored, and the matcher with which the log is searched. Patterns with the same conditions
-- become one expression: PostgreSQL keeps 32 expressions compiled, and with more of them each message would pay for
-- compiling. The cost of a message grows with the segments of all patterns, so those are bounded, too.
CREATE FUNCTION custody.compile_bindings(p_bindings jsonb, OUT bindings jsonb, OUT matcher jsonb)
LANGUAGE plpgsql AS $$
DECLARE
    v_help constant text :=
        'Give a list, each a pattern or an object with a pattern, with headers (text by name), or with both.';
    v_one  jsonb;
    v_size record;
BEGIN
    IF p_bindings IS NULL OR p_bindings IN ('null', '[]') THEN
        RETURN;
    ELSIF jsonb_typeof(p_bindings) <> 'array' THEN
        PERFORM custody.refuse('invalid_argument', 'bindings are a list', v_help);
    ELSIF jsonb_array_length(p_bindings) > 100 THEN
        PERFORM custody.refuse('invalid_argument', 'a group has at most 100 bindings',
            'Use patterns that cover more, or more groups.');
    ELSIF length(p_bindings::text) > 50000 THEN
        PERFORM custody.refuse('invalid_argument', 'the bindings of a group have at most 50,000 characters',
            'Use fewer or shorter ones, or more groups.');
    END IF;
    bindings := '[]';
    FOR v_one IN SELECT CASE jsonb_typeof(b) WHEN 'string' THEN jsonb_build_object('pattern', b) ELSE b END
        FROM jsonb_array_elements(p_bindings) b LOOP
        IF jsonb_typeof(v_one) = 'object' AND v_one -> 'pattern' = 'null' THEN
            v_one := v_one - 'pattern';
        END IF;
        IF jsonb_typeof(v_one) = 'object' AND v_one -> 'headers' IN ('null', '{}') THEN
            v_one := v_one - 'headers';
        END IF;
        IF jsonb_typeof(v_one) <> 'object' OR v_one = '{}' OR v_one - 'pattern' - 'headers' <> '{}'
            OR jsonb_typeof(v_one -> 'pattern') <> 'string' OR jsonb_typeof(v_one -> 'headers') <> 'object'
            OR EXISTS (SELECT FROM jsonb_each(CASE WHEN jsonb_typeof(v_one -> 'headers') = 'object'
                                                   THEN v_one -> 'headers' END) h
                       WHERE jsonb_typeof(h.value) <> 'string')
        THEN
            PERFORM custody.refuse('invalid_argument', format('%s is not a binding', left(v_one::text, 200)), v_help);
        ELSIF (SELECT count(*) FROM jsonb_object_keys(coalesce(v_one -> 'headers', '{}'))) > 20 THEN
            PERFORM custody.refuse('invalid_argument',
                format('%s has more than 20 header conditions', left(v_one::text, 200)),
                'Use fewer; a header that says what several say now needs one condition.');
        END IF;
        bindings := bindings || v_one;
    END LOOP;
    SELECT coalesce(sum(cardinality(string_to_array(b ->> 'pattern', '.'))), 0) AS segments,
           coalesce(sum(length(b ->> 'pattern')), 0) AS characters
    INTO v_size FROM (SELECT DISTINCT b FROM jsonb_array_elements(bindings) b) d;
    IF v_size.segments > 1000 OR v_size.characters > 10000 THEN
        PERFORM custody.refuse('invalid_argument',
            format('the patterns of a group have at most 1,000 segments and 10,000 characters together, not %s and %s',
                   v_size.segments, v_size.characters),
            'Use fewer or shorter patterns, or more groups.');
    END IF;
    SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object('headers', x.headers, 'expression',
                                                          '^(?:' || x.expressions || ')$')))
    INTO matcher
    FROM (SELECT b -> 'headers' AS headers, string_agg(custody.pattern_expression(b ->> 'pattern'), '|') AS expressions
          FROM (SELECT DISTINCT b FROM jsonb_array_elements(bindings) b) d
          GROUP BY b -> 'headers', b ? 'pattern') x;
    IF jsonb_array_length(matcher) > 20 THEN
        PERFORM custody.refuse('invalid_argument',
            'the bindings of a group have at most 20 different header conditions',
            'Use fewer conditions, or more groups.');
    END IF;
    BEGIN
        PERFORM '' ~ (m ->> 'expression') FROM jsonb_array_elements(matcher) m;
    EXCEPTION WHEN invalid_regular_expression THEN
        PERFORM custody.refuse('invalid_argument', 'the bindings are too much for one expression',
            'Use fewer or shorter patterns.');
    END;
END $$;

-- A fair claim reads far ahead for other keys, a bound one for messages that match. Together they would have no bound.
CREATE FUNCTION custody.require_one_look(p_group custody.groups) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF (p_group).fairness IS NOT NULL AND (p_group).bindings IS NOT NULL THEN
        PERFORM custody.refuse('invalid_argument', format('group %L cannot be bound and fair at once', (p_group).name),
            'Bind it to everything, or leave its fairness out; '
            'a pipeline can pass on to a topic of their own what the group is bound to.');
    END IF;
END $$;

-- Locks the cursors: after this no claim of the group is under way.
CREATE FUNCTION custody.lock_cursors(p_group_id int) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM custody.cursors WHERE group_id = p_group_id ORDER BY partition FOR UPDATE;
END $$;

-- Binds a group anew. This applies to messages that it has not matched yet, and to rewound ones. Messages that were
-- handed out stay. Null or an empty list binds it to every message. The cursors are locked, so no claim goes on with
-- the old bindings.
CREATE FUNCTION custody.bind(
    p_topic text, p_group text, p_bindings jsonb DEFAULT NULL, p_actor text DEFAULT NULL,
    p_now timestamptz DEFAULT NULL
)
RETURNS custody.groups
LANGUAGE plpgsql AS $$
DECLARE
    v_group custody.groups;
    v_bound record;
BEGIN
    PERFORM custody.require_read_committed();
    v_group := custody.lifecycle_group(p_topic, p_group);
    v_bound := custody.compile_bindings(p_bindings);
    PERFORM custody.lock_cursors(v_group.group_id);
    UPDATE custody.groups SET bindings = v_bound.bindings, matcher = v_bound.matcher, binding_no = binding_no + 1
    WHERE group_id = v_group.group_id RETURNING * INTO v_group;
    IF NOT FOUND THEN
        PERFORM custody.group_named(p_topic, p_group);      -- the group was deleted meanwhile
    END IF;
    PERFORM custody.require_one_look(v_group);
    UPDATE custody.cursors SET binding_no = v_group.binding_no WHERE group_id = v_group.group_id;
    INSERT INTO custody.journal (at, kind, group_id, worker, detail)
    VALUES (coalesce(p_now, clock_timestamp()), 'policy', v_group.group_id, p_actor,
            jsonb_build_object('bindings', v_bound.bindings));
    RETURN v_group;
END $$;

-- The condition on a message `e` of the log. All input of users is quoted.
CREATE FUNCTION custody.bound_condition(p_matcher jsonb) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT string_agg(concat_ws(' AND ',
        CASE WHEN m ? 'headers' THEN format('e.headers @> %L', m -> 'headers') END,
        CASE WHEN m ? 'expression' THEN format('(e.headers ->> ''x-custody-routing-key'') ~ %L',
                                               m ->> 'expression') END), ' OR ')
    FROM jsonb_array_elements(p_matcher) m
$$;

-- Searches a set of offsets, the lowest first, for up to p_want messages that match. `looked` is the part that was
-- searched. It goes in steps, each twice as long as the one before, and begins none after p_stop, because matching can
-- be slow.
CREATE FUNCTION custody.look(
    p_head custody.heads, p_matcher jsonb, p_set int8multirange, p_want bigint, p_stop timestamptz,
    OUT offsets bigint[], OUT keys text[], OUT looked int8multirange
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_condition text := custody.bound_condition(p_matcher);
    v_step      bigint := greatest(64, least(p_want, 1000));
    v_left      int8multirange := p_set;
    v_piece     int8multirange;
    v_source    record;
    v_found     record;
BEGIN
    offsets := '{}';
    keys := '{}';
    looked := '{}';
    WHILE NOT isempty(v_left) AND (isempty(looked) OR clock_timestamp() < p_stop) LOOP
        v_piece := custody.first_offsets(v_left, v_step);
        FOR v_source IN SELECT * FROM custody.segments_over(p_head, lower(v_piece), upper(v_piece)) LOOP
            -- Nested, so that rows come by offset, and LIMIT stops the reading.
            EXECUTE format(
                CASE WHEN custody.has_batches(v_source.source, (p_head).partition, v_source.from_offset,
                                              v_source.until_offset)
                THEN 'SELECT array_agg(m."offset") AS offsets, array_agg(m.key) AS keys FROM (
                         SELECT e."offset", e.key FROM unnest($1) r,
                         LATERAL (SELECT b.*, greatest(lower(r) - b.first, 0)::int + 1 AS low,
                                         least(upper(r) - b.first, b.n)::int AS high
                                  FROM (SELECT l."offset" - l.n + 1 AS first, l.n, l.key, l.keys, l.headers,
                                               l.headers_each
                                        FROM %1$s AND l."offset" >= lower(r) AND l."offset" <= coalesce((
                                            SELECT l."offset" FROM %1$s AND l."offset" >= upper(r) - 1
                                            ORDER BY l."offset" LIMIT 1), upper(r))
                                        ORDER BY l."offset") b) l,
                         LATERAL (SELECT l.first + l.low - 2 + u.i AS "offset", u.key, u.headers
                                  FROM unnest(CASE WHEN l.n = 1 THEN ARRAY[l.key] ELSE l.keys[l.low:l.high] END,
                                              CASE WHEN l.n = 1 THEN ARRAY[l.headers]
                                                   ELSE l.headers_each[l.low:l.high] END,
                                              array_fill(0, ARRAY[l.high - l.low + 1]))
                                       WITH ORDINALITY u (key, headers, x, i)) e
                         WHERE %2$s LIMIT $2) m'
                ELSE 'SELECT array_agg(m."offset") AS offsets, array_agg(m.key) AS keys FROM (
                          SELECT e."offset", e.key FROM unnest($1) r,
                          LATERAL (SELECT "offset", key, headers FROM %1$s AND "offset" >= lower(r)
                                   AND "offset" < upper(r) ORDER BY "offset") e
                          WHERE %2$s LIMIT $2) m' END,
                replace(v_source.source, ' WHERE ', ' l WHERE '), v_condition)
            INTO v_found
            USING v_piece * int8multirange(int8range(v_source.from_offset, v_source.until_offset)),
                  p_want - cardinality(offsets);
            CONTINUE WHEN v_found.offsets IS NULL;
            offsets := offsets || v_found.offsets;
            keys := keys || v_found.keys;
            IF cardinality(offsets) >= p_want THEN
                looked := p_set * int8multirange(int8range(NULL, offsets[cardinality(offsets)] + 1));
                RETURN;
            END IF;
        END LOOP;
        looked := looked + v_piece;
        v_left := v_left - v_piece;
        v_step := v_step * 2;
    END LOOP;
END $$;

CREATE FUNCTION custody.journal_pass(
    p_group_id int, p_partition int, p_passed int8multirange, p_worker text, p_now timestamptz
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO custody.journal (at, kind, group_id, partition, offsets, worker)
    SELECT p_now, 'pass', p_group_id, p_partition, p_passed, p_worker WHERE NOT isempty(p_passed)
$$;

-- Takes fresh messages that the group is bound to, and passes over the rest. At most p_look messages are matched under
-- the lock, and none long after p_stop. So the frontier may move although nothing is taken. With p_blocking the keys
-- are checked as in take_fresh.
CREATE FUNCTION custody.take_bound(
    p_group custody.groups, p_head custody.heads, p_in_flight int8multirange, p_frontier bigint, p_until bigint,
    p_max int, p_look bigint, p_stop timestamptz, p_blocking boolean, p_worker text, p_now timestamptz,
    OUT taken int8multirange, OUT frontier bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_end     constant bigint := least(p_until, p_frontier + p_look);
    v_left    bigint := p_max;
    v_want    bigint := CASE WHEN p_blocking THEN p_max + p_max / 4 + 16 ELSE p_max END;
    v_found   record;
    v_busy    custody.busy;
    v_blocked text[];
    v_parked  record;
    v_free    bigint[];
    v_cut     bigint;
    v_passed  int8multirange := '{}';
BEGIN
    taken := '{}';
    frontier := p_frontier;
    WHILE frontier < v_end AND v_left * 2 > p_max AND (frontier = p_frontier OR clock_timestamp() < p_stop) LOOP
        v_found := custody.look(p_head, (p_group).matcher, int8multirange(int8range(frontier, v_end)), v_want, p_stop);
        v_cut := upper(v_found.looked);
        v_free := v_found.offsets;
        IF p_blocking AND cardinality(v_free) > 0 THEN
            v_busy := ROW('{}', '{}');
            IF p_in_flight IS NOT NULL THEN
                v_busy := custody.keys_in_flight(p_head, p_in_flight, v_found.keys);
            END IF;
            SELECT v_busy.keys || coalesce(array_agg(h.key), '{}') INTO v_blocked
            FROM custody.open_heads((p_group).group_id, (p_head).partition,
                                    (SELECT array_agg(DISTINCT k) FROM unnest(v_found.keys) k WHERE k IS NOT NULL)) h;
            SELECT coalesce(array_agg(m.o ORDER BY m.o), '{}') INTO v_free
            FROM unnest(v_found.offsets, v_found.keys) m (o, k)
            WHERE m.k IS NULL OR NOT m.k IN (SELECT unnest(v_blocked));
            IF cardinality(v_free) > v_left THEN
                v_cut := v_free[v_left] + 1;
                v_free := v_free[:v_left];
            END IF;
            SELECT array_agg(m.o ORDER BY m.o) AS offsets, array_agg(m.k ORDER BY m.o) AS keys INTO v_parked
            FROM unnest(v_found.offsets, v_found.keys) m (o, k) WHERE m.o < v_cut AND m.k IN (SELECT unnest(v_blocked));
            IF v_parked.offsets IS NOT NULL THEN
                PERFORM custody.park((p_group).group_id, (p_head).partition, v_parked.offsets, v_parked.keys, 0, NULL,
                                     NULL, NULL, p_now, true);
                PERFORM custody.await(p_group, (p_head).partition, v_busy);
            END IF;
            v_want := v_want * 4;       -- if it goes on: most of them were blocked
        END IF;
        v_passed := v_passed + (int8multirange(int8range(frontier, v_cut)) - custody.offsets_set(v_found.offsets));
        taken := taken + custody.offsets_set(v_free);
        v_left := v_left - cardinality(v_free);
        frontier := v_cut;
    END LOOP;
    PERFORM custody.journal_pass((p_group).group_id, (p_head).partition, v_passed, p_worker, p_now);
END $$;

-- Matches the lowest returned range, if a rewind brought it back and it was not matched since. Messages that the group
-- is not bound to are passed over; the others can be handed out. Returns how many messages were matched.
CREATE FUNCTION custody.sift_rewound(
    p_group custody.groups, p_head custody.heads, p_want bigint, p_oldest boolean, p_look bigint, p_stop timestamptz,
    p_worker text, p_now timestamptz
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_row   custody.returned;
    v_found record;
    v_bound int8multirange;
BEGIN
    SELECT * INTO v_row FROM custody.returned
    WHERE group_id = (p_group).group_id AND partition = (p_head).partition
    ORDER BY CASE WHEN p_oldest THEN return_id END, lower(ranges) LIMIT 1;
    IF NOT FOUND OR NOT v_row.rewound OR p_look <= 0 THEN
        RETURN 0;
    END IF;
    v_found := custody.look(p_head, (p_group).matcher, custody.first_offsets(v_row.ranges, p_look), p_want, p_stop);
    v_bound := custody.offsets_set(v_found.offsets);
    PERFORM custody.cut_returned(v_row.group_id, v_row.partition, v_found.looked);
    IF NOT isempty(v_bound) THEN
        INSERT INTO custody.returned (group_id, partition, ranges, attempts, returned_at)
        VALUES (v_row.group_id, v_row.partition, v_bound, v_row.attempts, v_row.returned_at);
    END IF;
    PERFORM custody.journal_pass(v_row.group_id, v_row.partition, v_found.looked - v_bound, p_worker, p_now);
    RETURN custody.cardinality(v_found.looked);
END $$;
