-- Sets of offsets are multiranges: a thousand neighbours cost as much as one.

-- In PL/pgSQL, as whatever a claim calls: before PostgreSQL 18 an SQL function that is not inlined is planned again in
-- each transaction. Most sets are one range, for which no statement is run.
CREATE FUNCTION custody.cardinality(p_set int8multirange) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_set = int8multirange(range_merge(p_set)) THEN
        RETURN coalesce(upper(p_set) - lower(p_set), 0);
    END IF;
    RETURN (SELECT coalesce(sum(upper(r) - lower(r)), 0) FROM unnest(p_set) r);
END $$;

CREATE FUNCTION custody.offsets_set(p_offsets bigint[]) RETURNS int8multirange
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(range_agg(int8range(o, o + 1)), '{}'::int8multirange) FROM unnest(p_offsets) o
$$;

CREATE FUNCTION custody.offsets_list(p_set int8multirange) RETURNS bigint[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(array_agg(o ORDER BY o), '{}') FROM unnest(p_set) r, generate_series(lower(r), upper(r) - 1) o
$$;

-- The first n offsets of a set.
CREATE FUNCTION custody.first_offsets(p_set int8multirange, p_n bigint) RETURNS int8multirange
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(range_agg(int8range(lower(r), least(upper(r), lower(r) + p_n - before::bigint))),
                    '{}'::int8multirange)
    FROM (
        SELECT r, sum(upper(r) - lower(r)) OVER (ORDER BY lower(r)) - (upper(r) - lower(r)) AS before
        FROM unnest(p_set) r
    ) x
    WHERE before < p_n
$$;
