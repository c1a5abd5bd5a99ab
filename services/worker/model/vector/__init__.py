"""Compiled vector code on torch's threads: what attention and linear layers on a CPU are built from."""
