-- Bulk reads: which tables a client has to read that streams the log itself.

-- Says of a source that its rows are messages, if there is no batch in this range. A range that is not full yet may get
-- one.
CREATE FUNCTION custody.plain_source(
    p_source text, p_partition int, p_from bigint, p_until bigint, p_end bigint
) RETURNS text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_until > p_end OR p_source LIKE 'custody.kept_events%'
        OR custody.has_batches(p_source, p_partition, p_from, p_until) THEN
        RETURN p_source;
    END IF;
    RETURN p_source || ' AND n = 1';
END $$;

-- The tables that hold [p_from, p_until) of a partition, and the part of it that each has. This is the log alone,
-- without the dead messages that were kept when their segment was dropped.
CREATE FUNCTION custody.log_reads(p_topic text, p_partition int, p_from bigint, p_until bigint)
RETURNS TABLE (source text, from_offset bigint, until_offset bigint)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_topic custody.topics := custody.topic_named(p_topic);
    v_head  custody.heads;
BEGIN
    PERFORM custody.require_partition(v_topic, p_partition);
    SELECT * INTO v_head FROM custody.heads WHERE topic_id = v_topic.topic_id AND partition = p_partition;
    IF p_from < v_head.first_offset THEN
        PERFORM custody.refuse('offset_out_of_range',
            format('offset %s of %s/%s is gone: the log starts at %s', p_from, p_topic, p_partition,
                   v_head.first_offset),
            'Start at the first offset, or read older messages from an archive.');
    ELSIF p_from < p_until THEN
        RETURN QUERY 
            SELECT custody.plain_source(s.source, (p_partition), s.from_offset, s.until_offset,
                                        (custody.tail(v_head)).next_offset), s.from_offset, s.until_offset
            FROM custody.segments_over(v_head, p_from, p_until) s;
    END IF;
END $$;
