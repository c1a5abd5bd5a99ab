"""How every benchmark speaks: progress on stderr, one JSON object as the last line of stdout, a telling exit code.

    {"name", "value", "unit", "floor", "peer", "ok", ...}

`ok` is whether `value` keeps its promise; null with `skipped` where the peer to compare with is absent. Exit code 0 only
if `ok`, 1 if not, 75 (EX_TEMPFAIL) if skipped. The README's table is made of these lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from statistics import median
from typing import Any, NoReturn

SKIPPED = 75


class Report:
    """One benchmark's run. `floor` is the least (or, with `lower_is_better`, the most) that `value` may be."""

    def __init__(
        self, name: str, unit: str, *, floor: float, peer: str | None = None, lower_is_better: bool = False
    ) -> None:
        self.name = name
        self.unit = unit
        self.floor = floor
        self.peer = peer
        self.lower_is_better = lower_is_better
        self._began = time.monotonic()

    def progress(self, text: str) -> None:
        """One line on stderr, with the seconds since the start."""
        print(f"[{self.name} {time.monotonic() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def finish(self, value: float, *, also: bool = True, **details: Any) -> NoReturn:
        """Print the result and exit. `also` is any further condition of being ok."""
        kept = value <= self.floor if self.lower_is_better else value >= self.floor
        self._print(value=round(value, 4), ok=kept and also, **details)
        sys.exit(0 if kept and also else 1)

    def skip(self, why: str) -> NoReturn:
        """The peer is absent."""
        self._print(value=None, ok=None, skipped=why)
        sys.exit(SKIPPED)

    def _print(self, **fields: Any) -> None:
        line = {"name": self.name, "unit": self.unit, "floor": self.floor, "peer": self.peer, **fields}
        print(json.dumps(line), flush=True)


def parser(description: str) -> argparse.ArgumentParser:
    """Command line with what all benchmarks share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="fewer repetitions")
    return made


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and most of some measurements."""
    ordered = sorted(values)
    return {"median": round(median(ordered), 6), "min": round(ordered[0], 6), "max": round(ordered[-1], 6)}
