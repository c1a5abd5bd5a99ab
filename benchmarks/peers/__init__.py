"""Ours against engines and indexes of others, and the programs that run those in environments of their own."""
