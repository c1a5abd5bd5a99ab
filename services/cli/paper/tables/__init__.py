"""The tables, one a file: each starts what it needs through `paper_fleet`, and judges its rows by a pure function."""
