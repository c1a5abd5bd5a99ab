"""How a block is written for a vault: as it is, or quantised."""
