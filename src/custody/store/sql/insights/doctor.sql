-- What `custody doctor` checks: the server, old snapshots, and how long leases take. Reads only.

CREATE FUNCTION custody.server_facts()
RETURNS TABLE (
    version_num int, version text, fsync boolean, full_page_writes boolean, synchronous_commit text, schema_version int
)
LANGUAGE sql STABLE AS $$
    SELECT current_setting('server_version_num')::int, current_setting('server_version'),
           current_setting('fsync')::boolean, current_setting('full_page_writes')::boolean,
           current_setting('synchronous_commit'),
           (SELECT max(version) FROM custody.migrations)
$$;

-- Transactions of this database that have been open for long: they keep dead rows from being removed, or hold locks.
CREATE FUNCTION custody.old_transactions(p_older interval DEFAULT '1 minute')
RETURNS TABLE (kind text, who text, pid int, since timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN a.state LIKE 'idle in transaction%' THEN 'idle in transaction' ELSE 'running' END,
           coalesce(nullif(a.application_name, ''), a.usename, 'unknown'), a.pid, a.xact_start
    FROM pg_stat_activity a
    WHERE a.datname = current_database() AND a.backend_type = 'client backend' AND a.pid <> pg_backend_pid()
      AND a.xact_start < clock_timestamp() - p_older
      AND (a.state LIKE 'idle in transaction%' OR a.backend_xmin IS NOT NULL)
    UNION ALL
    SELECT 'prepared', p.gid, NULL, p.prepared
    FROM pg_prepared_xacts p WHERE p.database = current_database() AND p.prepared < clock_timestamp() - p_older
    ORDER BY 4
$$;

-- How long leases took, from the claim to the last ack or nack, over the last p_leases of each group; and how many
-- expired in the last hour. If the worker went on after its lease expired, the lease was too short; the others died
-- with their worker. The journal is read from its end, a bounded number of entries for each partition.
CREATE FUNCTION custody.handling_times(
    p_topic text DEFAULT NULL, p_group text DEFAULT NULL, p_leases int DEFAULT 1000, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (
    topic text, consumer_group text, visibility_timeout interval, leases bigint, p50 double precision,
    p99 double precision, slowest double precision, expired bigint, expired_alive bigint
)
LANGUAGE sql STABLE AS $$
    SELECT t.name, g.name, g.visibility_timeout, h.leases, h.p50, h.p99, h.slowest, h.expired, h.alive
    FROM custody.topics t
    JOIN custody.groups g USING (topic_id)
    CROSS JOIN LATERAL (
        WITH recent AS MATERIALIZED (
            SELECT j.entry, j.at, j.kind, j.lease_id, j.worker, j.error
            FROM custody.cursors c
            CROSS JOIN LATERAL (
                SELECT * FROM custody.journal o WHERE o.group_id = c.group_id AND o.partition = c.partition
                ORDER BY o.entry DESC LIMIT greatest(1000, p_leases * 20 / t.partitions)) j
            WHERE c.group_id = g.group_id
        ), handled AS (
            SELECT extract(epoch FROM max(r.at) FILTER (WHERE r.kind <> 'claim')
                           - min(r.at) FILTER (WHERE r.kind = 'claim'))::float8 AS took
            FROM recent r WHERE r.kind IN ('claim', 'ack', 'nack')
            GROUP BY r.lease_id
            HAVING bool_or(r.kind = 'claim') AND bool_or(r.kind <> 'claim')
            ORDER BY min(r.entry) DESC LIMIT p_leases
        ), expired AS (
            SELECT r.lease_id, max(r.at) < max(w.last_seen) AS alive
            FROM recent r LEFT JOIN (SELECT worker, max(at) AS last_seen FROM recent
                                     WHERE kind NOT IN ('expire', 'dead') GROUP BY worker) w USING (worker)
            WHERE (r.kind = 'expire' OR r.kind = 'dead' AND r.error = 'lease expired')
              AND r.at > coalesce(p_now, clock_timestamp()) - interval '1 hour'
            GROUP BY r.lease_id
        )
        SELECT count(*) AS leases, percentile_cont(0.5) WITHIN GROUP (ORDER BY took) AS p50,
               percentile_cont(0.99) WITHIN GROUP (ORDER BY took) AS p99, max(took) AS slowest,
               (SELECT count(*) FROM expired) AS expired, (SELECT count(*) FROM expired WHERE alive) AS alive
        FROM handled
    ) h
    WHERE NOT g.bare AND (p_topic IS NULL OR t.name = p_topic) AND (p_group IS NULL OR g.name = p_group)
    ORDER BY t.name, g.name
$$;
