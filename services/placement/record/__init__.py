"""What was decided and what became of it: ledger and traces."""
