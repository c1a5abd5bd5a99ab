"""Which cached block goes first when room is needed: one small interface, one file per policy."""
