"""From nothing to our first token, as a process: `python -m benchmarks.peers._start FOLDER DTYPE THREADS SEQUENCES`.

Imports, loads, packs, compiles, and decodes the very warm-up that a peer decodes before it says that it is ready.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness.peers import _WARM_UP as WARM_UP
from benchmarks.harness.peers import ROOT


def seconds_to_start(folder: Path, dtype: str, threads: int, sequences: int, kernels: Path) -> float:
    """Wall time of such a process up to its line; compiled kernels are looked for, and kept, in `kernels`."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peers._start", str(folder), dtype, str(threads), str(sequences)],
        cwd=ROOT,
        env=os.environ | {"NUMBA_CACHE_DIR": str(kernels), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = time.perf_counter() - began
    process.communicate()
    assert line == "ready\n", f"our engine did not start: {line!r}"
    return seconds


def main() -> None:
    folder, dtype, threads, sequences = sys.argv[1:]
    from benchmarks.engine._engine import Ours  # importing is a part of starting

    ours = Ours(Path(folder), dtype, threads=int(threads), sequences=int(sequences))  # type: ignore[arg-type]
    ours.generate(WARM_UP, 4)
    print("ready", flush=True)


if __name__ == "__main__":
    main()
