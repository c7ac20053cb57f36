-- The functions of these names: their parameters with types, how many of these are required, and what they return.
SELECT p.proname::text AS name,
       coalesce((SELECT jsonb_agg(jsonb_build_array(p.proargnames[n], format_type(p.proargtypes[n - 1], NULL))
                 ORDER BY n) FROM generate_series(1, p.pronargs) n), '[]') AS parameters,
       p.pronargs - p.pronargdefaults AS required,
       coalesce((SELECT jsonb_agg(jsonb_build_array(p.proargnames[n], format_type(p.proallargtypes[n], NULL))
                 ORDER BY n) FROM generate_series(1, cardinality(p.proallargtypes)) n
                 WHERE p.proargmodes[n] IN ('o', 'b', 't')),
                (SELECT jsonb_agg(jsonb_build_array(a.attname, format_type(a.atttypid, NULL)) ORDER BY a.attnum)
                 FROM pg_type t JOIN pg_attribute a ON a.attrelid = t.typrelid
                 WHERE t.oid = p.prorettype AND a.attnum > 0 AND NOT a.attisdropped),
                jsonb_build_array(jsonb_build_array(p.proname, format_type(p.prorettype, NULL)))) AS columns
FROM pg_proc p
WHERE p.pronamespace = 'custody'::regnamespace AND p.proname = ANY (%(names)s)
UNION ALL
SELECT c.relname::text, NULL, NULL,
       (SELECT jsonb_agg(jsonb_build_array(a.attname, format_type(a.atttypid, NULL)) ORDER BY a.attnum)
        FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
FROM pg_class c
WHERE c.relnamespace = 'custody'::regnamespace AND c.relname = ANY (%(names)s) AND c.relkind IN ('v', 'r', 'p')
ORDER BY 1
