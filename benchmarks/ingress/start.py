"""How long `kvfleet up` takes to its ready line, and what an idle worker of the demo model takes of the memory.

    python -m benchmarks.start [--quick]

In turn with `python -c "import torch, transformers"`, which no worker does without: seconds to that line over the
seconds of that import; memory of the workers, with what they are forked from, per worker over that process's. Memory is
the proportional set size (what several processes share counts in parts), after the fleet has answered nothing yet. A
first start, which compiles kernels, is not counted.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.harness.report import finish, parse_quick, progress, spread

WORKERS = 2
TIME_FLOOR, MEMORY_FLOOR = 1.5, 1.5
SETTLED_S = 2.0
IMPORT = "import torch, transformers; print('there', flush=True); input()"


def pss_bytes(pid: int) -> int:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(one for child in children for one in descendants(child))]


def started(command: list[str], answer: str) -> tuple[subprocess.Popen[str], float]:
    """A process and the seconds to its first line, which begins so."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = time.perf_counter() - began
    if not line.startswith(answer):
        raise SystemExit(f"{command} did not start: {line!r}")
    return process, seconds


def imported() -> tuple[float, int]:
    process, seconds = started([sys.executable, "-c", IMPORT], "there")
    size = pss_bytes(process.pid)
    process.communicate("\n")
    return seconds, size


def fleet() -> tuple[float, float]:
    """Seconds to the ready line, bytes per worker."""
    command = [str(Path(sys.executable).with_name("kvfleet")), "up", "--port=0", f"--workers={WORKERS}"]
    process, seconds = started(command, "ready ")
    try:
        time.sleep(SETTLED_S)
        commands = {one: Path(f"/proc/{one}/cmdline").read_bytes() for one in descendants(process.pid)}
        workers = [one for one, command in commands.items() if b"kvfleet.worker" in command]
        return seconds, sum(map(pss_bytes, workers)) / WORKERS
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main() -> None:
    quick = parse_quick(__doc__)
    fleet(), imported()
    times, sizes, imports, bases = [], [], [], []
    for _ in range(3 if quick else 7):
        base_s, base = imported()
        ready_s, size = fleet()
        imports.append(base_s)
        bases.append(base)
        times.append(ready_s)
        sizes.append(size)
        progress(
            f"ready in {ready_s:.2f} s, the import takes {base_s:.2f} s; a worker {size / 2**20:.0f} MiB, "
            f"the import {base / 2**20:.0f} MiB"
        )
    value = median(ready / base for ready, base in zip(times, imports, strict=True))
    memory = median(size / base for size, base in zip(sizes, bases, strict=True))
    finish(
        "start",
        round(value, 3),
        "times the import",
        floor=TIME_FLOOR,
        ok=value <= TIME_FLOOR and memory <= MEMORY_FLOOR,
        memory=round(memory, 3),
        memory_floor=MEMORY_FLOOR,
        ready_s=spread(times),
        import_s=spread(imports),
        worker_bytes=round(median(sizes)),
        import_bytes=round(median(bases)),
        workers=WORKERS,
    )


if __name__ == "__main__":
    main()
