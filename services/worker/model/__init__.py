"""Whatever computes: loading and probing a model, the KV pool, attention, sampling, the runner of a step."""
