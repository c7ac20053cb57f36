-- Bulk reads: which tables a client has to read that streams the log itself.

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
        RETURN QUERY SELECT * FROM custody.segments_over(v_head, p_from, p_until);
    END IF;
END $$;
