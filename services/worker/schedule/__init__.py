"""What runs in the next step: sequences, their order, their share of a step, and who gives way. Pure."""
