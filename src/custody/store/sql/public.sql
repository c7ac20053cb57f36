-- Takes the functions from PUBLIC, which may execute every new one. The functions of segments stay: each new segment
-- has some, and they need the rights on its table.
DO $$
DECLARE
    v_own regprocedure;
BEGIN
    REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA custody FROM PUBLIC;
    FOR v_own IN
        SELECT oid FROM pg_proc
        WHERE pronamespace = 'custody'::regnamespace AND proname ~ '^(append|slices|keys)_[0-9]+$'
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO PUBLIC', v_own);
    END LOOP;
END $$;
