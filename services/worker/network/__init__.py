"""What a worker asks of vaults and of other workers, and lends to them."""
