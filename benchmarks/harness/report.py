"""How every benchmark speaks: progress on stderr, one JSON object as the last line of stdout, a telling exit code.

    {"name", "value", "unit", "floor", "peer", "ok", ...}

`ok` is whether the promise is kept; null with `skipped` where the peer to compare with is absent or gave up, which is
no fault of ours. The exit code is 0 only if `ok`, 1 if not, 75 (EX_TEMPFAIL) if skipped. The README's table is made
of these lines.
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

_began = time.monotonic()


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with what all benchmarks share; for those that take more."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="fewer repetitions")
    return made


def parse_quick(description: str | None) -> bool:
    """Read the command line of a benchmark that takes `--quick` only."""
    return bool(parser(description).parse_args().quick)


def progress(text: str) -> None:
    """One line on stderr, with the seconds since the start."""
    print(f"[{time.monotonic() - _began:6.1f} s] {text}", file=sys.stderr, flush=True)


def finish(
    name: str, value: float, unit: str, *, floor: float, ok: bool, peer: str | None = None, **details: Any
) -> NoReturn:
    """Print the result and exit."""
    _print(name=name, value=value, unit=unit, floor=floor, peer=peer, ok=ok, **details)
    sys.exit(0 if ok else 1)


def skip(name: str, unit: str, *, floor: float, peer: str, why: str, **details: Any) -> NoReturn:
    """The peer is absent or gave up: of the whole nothing is claimed. `details` may tell of parts of it."""
    _print(name=name, value=None, unit=unit, floor=floor, peer=peer, ok=None, skipped=why, **details)
    sys.exit(SKIPPED)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and most of some measurements."""
    ordered = sorted(values)
    return {"median": round(median(ordered), 6), "min": round(ordered[0], 6), "max": round(ordered[-1], 6)}


def _print(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)
