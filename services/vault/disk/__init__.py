"""Blocks on disk: segments of records, written and read by a thread of its own."""
