"""One request of a client, from its placement to its last token, over as many attempts as it takes."""
