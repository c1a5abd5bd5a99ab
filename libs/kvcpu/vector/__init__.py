"""Loops over vectors of numbers, as LLVM gets them; a team of threads; compiled programs."""
