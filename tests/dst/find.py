"""Finds a seed for each mutation, and writes it into its patch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.dst import mutate

SEEDS = 500
_SEED = re.compile(r"^(\d+) [0-9a-f]{16} ")


def seed_of(name: str) -> int | None:
    """The first that shows it, the one that it names first of all; not one that shows something without it."""
    known = mutate.read(name).seed
    if known is not None and _failing(known, 1, name) == known and _failing(known, 1) is None:
        return known
    first = 1
    while (seed := _failing(first, SEEDS + 1 - first, name)) is not None and _failing(seed, 1) is not None:
        first = seed + 1
    return seed


def _failing(first: int, seeds: int, mutation: str | None = None) -> int | None:
    """The first of them that breaks a promise."""
    which = ["--first", str(first), "--seeds", str(seeds), "--jobs", "1"]
    which += ["--mutation", mutation] if mutation is not None else []
    done = subprocess.run([sys.executable, "-m", "tests.dst", "run", *which], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if _SEED.match(line)]
    if done.returncode != 1 or not lines or "WRONG" not in done.stdout:
        return None
    return int(lines[-1].split()[0])


def main(names: list[str]) -> int:
    """Returns how many are not found."""
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wanted = names or mutate.names()
        for name, seed in zip(wanted, pool.map(seed_of, wanted), strict=True):
            print(f"{name}: {seed}", flush=True)
            missed += seed is None
            if seed is not None:
                path = mutate.FOLDER / f"{name}.patch"
                lines = [line for line in path.read_text().splitlines(keepends=True) if not line.startswith("# seed ")]
                at = next(at for at, line in enumerate(lines) if line.startswith("---"))
                path.write_text("".join([*lines[:at], f"# seed {seed}\n", *lines[at:]]))
    return missed
