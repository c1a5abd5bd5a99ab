"""Linear layers on a CPU, on weights packed for it."""
