"""Attention over the paged KV pool: one interface, one file per backend."""
