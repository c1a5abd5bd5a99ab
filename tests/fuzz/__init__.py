"""What arrives from outside, damaged on purpose: each reader on its own is in tests/unit, whole ways in are here."""
