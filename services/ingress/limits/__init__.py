"""Who asks, and how much each may have at once and per minute, over all ingresses of a region."""
