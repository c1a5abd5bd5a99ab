"""What an operator does to a running fleet: make its buckets, drain a worker, load adapters."""
