"""Attention on a CPU, straight over the block-major pool."""
