"""Runs a command, and ends it and all that it started when told to, or when whoever started this is gone.

    python session_guard.py NICENESS COMMAND...

The command leads a process group in this one's session. SIGTERM here ends it in good order: SIGTERM for the command,
and SIGKILL for what is left of its group after `TERM_S`. The exit status is the command's.

Where the kernel shares processors among sessions first, it is the session that is nice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

TERM_S = 15.0
LEFT_S = 2.0  # for what outlives the command by design, as multiprocessing's resource tracker, which then tidies up
PAUSE_S = 0.1


def main(niceness: int, command: list[str]) -> int:
    parent, told = os.getppid(), False
    if niceness:
        os.nice(niceness)
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))

    def tell(*_: object) -> None:
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, tell)
    process = subprocess.Popen(command, process_group=0)
    while process.poll() is None and not told and os.getppid() == parent:
        time.sleep(PAUSE_S)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(TERM_S)
    with suppress(ProcessLookupError):  # raised when nothing is left of the group
        end = time.monotonic() + LEFT_S
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(PAUSE_S)
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
