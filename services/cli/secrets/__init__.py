"""Keys, passwords and certificates of a fleet: `secrets` and `key`."""
