"""The prefix index: which worker or vault holds which blocks, followed through events and snapshots."""
