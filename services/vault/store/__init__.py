"""What a vault holds: blocks in memory, their order of eviction, and what changed."""
