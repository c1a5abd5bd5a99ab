"""Attention of a ragged batch over the paged KV pool, by one family of Triton kernels."""
