"""Placement's prefix index and its decisions: in one process, and over NATS with fake fleets."""
