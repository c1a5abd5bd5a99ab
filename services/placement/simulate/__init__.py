"""The simulator: traces replayed against placement's own code, without a fleet."""
