"""Blocks outside the device: host, vault, data plane and codec, and what they bring to a first token."""
