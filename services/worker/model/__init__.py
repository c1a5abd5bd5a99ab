"""Running models: what computes tokens from tokens and blocks. The only place of the worker that knows torch."""
