"""Attention over blocks: cut into items, attended by threads, combined."""
