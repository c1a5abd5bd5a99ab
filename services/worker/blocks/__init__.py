"""Blocks of the KV pool: who uses them, what is in which, what is evicted, and where other copies are. Pure."""
