"""Tokens drawn from logits on the device, the same ones as on a CPU."""
