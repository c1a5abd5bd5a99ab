"""Tensor parallelism over the cards of one host: a worker is a group of processes, of which each holds some heads."""
