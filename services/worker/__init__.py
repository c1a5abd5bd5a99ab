"""A worker: loads a model, keeps K and V of many sequences in blocks, and streams tokens."""
