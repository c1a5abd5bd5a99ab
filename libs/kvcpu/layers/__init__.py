"""Linear layers with packed weights, and what stands between them: norms, rotations, gates."""
