-- Takes the functions from PUBLIC, which may execute every new one. The functions append_<segment> stay: each new
-- segment has one, and it needs the rights on the segment's table.
DO $$
DECLARE
    v_append regprocedure;
BEGIN
    REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA custody FROM PUBLIC;
    FOR v_append IN
        SELECT oid FROM pg_proc WHERE pronamespace = 'custody'::regnamespace AND proname ~ '^append_[0-9]+$'
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO PUBLIC', v_append);
    END LOOP;
END $$;
