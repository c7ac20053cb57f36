-- A key stands in indexes of the groups' state, whose entries have less than 2,704 bytes. A longer one would be accepted here, and fail
-- every claim of its partition later. What is stored already is not looked at.

ALTER TABLE custody.log ADD CONSTRAINT key_length CHECK (octet_length(key) <= 2000) NOT VALID;
ALTER TABLE custody.delayed ADD CONSTRAINT key_length CHECK (octet_length(key) <= 2000) NOT VALID;
ALTER TABLE custody.transaction_messages ADD CONSTRAINT key_length CHECK (octet_length(key) <= 2000) NOT VALID;
