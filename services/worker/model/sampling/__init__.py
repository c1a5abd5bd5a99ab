"""How a row of logits becomes a token: `sampler` puts the parts together."""
