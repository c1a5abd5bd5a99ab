"""Who holds which blocks: the global prefix index."""
