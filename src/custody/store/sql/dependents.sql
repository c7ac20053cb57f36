-- Objects of users that depend on views, routines or composite types of the schema, and would be lost with them: views,
-- indexes, columns, triggers. Triggers on tables of the schema that call its functions belong to the schema. The parts
-- of a view or type (its rule, its row type) go with it: deptype i.
WITH RECURSIVE ours (classid, objid) AS (
    SELECT 'pg_class'::regclass::oid, oid FROM pg_class WHERE relnamespace = 'custody'::regnamespace AND relkind = 'v'
    UNION
    SELECT 'pg_proc'::regclass::oid, oid FROM pg_proc WHERE pronamespace = 'custody'::regnamespace
    UNION
    SELECT 'pg_type'::regclass::oid, reltype FROM pg_class
    WHERE relnamespace = 'custody'::regnamespace AND relkind = 'c'
    UNION
    SELECT d.classid, d.objid FROM ours o
    JOIN pg_depend d ON d.refclassid = o.classid AND d.refobjid = o.objid AND d.deptype = 'i'
)
SELECT DISTINCT CASE WHEN r.ev_class IS NULL THEN pg_describe_object(d.classid, d.objid, d.objsubid)
                     ELSE pg_describe_object('pg_class'::regclass, r.ev_class, 0) END
FROM ours o
JOIN pg_depend d ON d.refclassid = o.classid AND d.refobjid = o.objid
-- a view depends on other objects by its rule
LEFT JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
LEFT JOIN pg_trigger t ON d.classid = 'pg_trigger'::regclass AND t.oid = d.objid
LEFT JOIN pg_class c ON c.oid = t.tgrelid
LEFT JOIN pg_proc f ON f.oid = t.tgfoid
WHERE (d.classid, d.objid) NOT IN (SELECT classid, objid FROM ours)
  AND NOT coalesce(c.relkind = 'r' AND c.relnamespace = 'custody'::regnamespace
                   AND f.pronamespace = 'custody'::regnamespace, false)
ORDER BY 1
