-- Sets of offsets are multiranges: a thousand neighbours cost as much as one.

CREATE FUNCTION custody.cardinality(p_set int8multirange) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_set = int8multirange(range_merge(p_set)) THEN
        RETURN coalesce(upper(p_set) - lower(p_set), 0);
    END IF;
    RETURN coalesce(sum(upper(r) - lower(r)), 0) FROM unnest(p_set) r;
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
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_range int8range;
BEGIN
    FOR v_range IN SELECT unnest(p_set) LOOP
        EXIT WHEN p_n <= 0;
        p_n := p_n - (upper(v_range) - lower(v_range));
        IF p_n <= 0 THEN
            RETURN p_set * int8multirange(int8range(NULL, upper(v_range) + p_n));
        END IF;
    END LOOP;
    RETURN CASE WHEN p_n > 0 THEN p_set ELSE '{}' END;
END $$;
