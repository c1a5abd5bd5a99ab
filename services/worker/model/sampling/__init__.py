"""How a row of logits becomes a token: `sampler.py` next door puts the parts together."""
