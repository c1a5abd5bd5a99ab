"""What was decided and what became of it: ledger, traces and metrics."""
