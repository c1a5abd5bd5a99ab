"""How K and V travel: framed sockets between workers and vaults. NATS carries descriptors, never blocks."""
