"""What a fleet adds to its engines as its clients see it: latency, token rates, streams at once, start."""
