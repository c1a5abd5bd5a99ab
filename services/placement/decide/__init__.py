"""The decision: candidates, admission, the worker that is chosen, and the account of it. Pure."""
