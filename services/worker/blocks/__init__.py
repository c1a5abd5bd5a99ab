"""Blocks of the KV pool: who uses them, which content is in which, and what is evicted. Pure."""
