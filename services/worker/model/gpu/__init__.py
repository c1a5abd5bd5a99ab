"""What a GPU has of its own: recorded steps, times by its events, copies beside steps, and what fits into it."""
