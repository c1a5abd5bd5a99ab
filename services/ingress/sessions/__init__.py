"""Sessions: the history of each, the blocks that it has, and what is to be erased with it."""
