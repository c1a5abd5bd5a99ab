"""HTTP of the simulated fleet does as HTTP does, and does it again to the bit."""

from __future__ import annotations

import os
import subprocess
import sys

COMMAND = """
import os, sys, traceback
from tests.dst import sockets, threads
threads.install()
sockets.install()
status = 1
try:
    from tests.dst import web_trial
    status = web_trial.main(sys.argv[1:])
except BaseException:
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)  # threads that the simulation has left would be waited for
"""


def lines() -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", COMMAND]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout.splitlines()


def test_requests_over_http_and_again_as_they_were() -> None:
    """In two processes, with their times."""
    first, second = lines(), lines()
    assert first == second
    assert len(first) > 20
