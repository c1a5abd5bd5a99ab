"""How many workers, how much memory: `plan` and `kv-size`."""
