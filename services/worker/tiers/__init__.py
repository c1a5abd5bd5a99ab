"""Blocks beyond the device: host memory, vaults, peers, and what it pays to fetch from them."""
