"""Linear layers with packed weights."""
