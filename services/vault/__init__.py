"""A vault: keeps blocks of many workers in memory and on disk, and serves them to workers."""
