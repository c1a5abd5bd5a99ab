"""What stands between linear layers: norms, rotations, gates."""
