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
    """The first that shows it, the one that it names first of all."""
    known = mutate.read(name).seed
    if known is not None and _found(name, known, 1) == known:
        return known
    return _found(name, 1, SEEDS)


def _found(name: str, first: int, seeds: int) -> int | None:
    which = ["--first", str(first), "--seeds", str(seeds), "--mutation", name, "--jobs", "1"]
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
