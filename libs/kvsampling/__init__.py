"""How a row of logits becomes a token, the same one in every engine: `sampler` puts the parts together."""
