"""`kvfleet bench` as users type it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.waiting import LIMIT_S

COMMAND = [sys.executable, "-P", "-m", "kvfleet.cli.main", "bench"]


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=LIMIT_S, check=False)


def bench_json(*flags: str) -> dict[str, Any]:
    """The last line of stdout."""
    done = bench(*flags, "--json")
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
