"""A process that runs one vLLM server, and ends with it. Its arguments: a worker's name, and the server's command.

    SIGTERM, or its owner is gone ──▶ SIGTERM to the server ── TERM_S ──▶ SIGKILL to its group
    the server ended by itself ─────────────────────────────────────────▶ SIGKILL to its group

vLLM is several processes, which a killed server leaves behind; they lead a group in this one's session. What the server
prints goes on to stderr. If it fails, the line that says why comes once more, last.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from kvfleet.cli.embedded.processes import PR_SET_PDEATHSIG, StopRequest

TERM_S = 2.5
TIDY_S = 0.5
LOOK_EVERY_S = 0.05
TRACKER = (
    b"resource_tracker"  # of Python's multiprocessing: ignores SIGTERM, and frees shared memory when all others died
)
SAID_BY = re.compile(r"^\([\w-]+ pid=\d+\) |^ERROR \S+ \S+ \[[^]]+\] ")
REASON = re.compile(r"^(?:\S+: error: |(?:\w+\.)*\w*(?:Error|Exception): )(?P<why>.*)")
CONSEQUENCES = ("Engine core initialization failed", "Worker failed with error", "EngineCore encountered an issue")


@dataclass(slots=True)
class VllmLog:
    """Fed line by line. `why`: what the last error is that no other error led to; empty: none was seen."""

    why: str = ""
    _in_usage: bool = False
    _is_open: bool = False  # the reason goes on in the next line

    def passes(self, line: str) -> bool:
        """Whether it is worth reading: the usage of a wrong flag, all 300 lines of it, is not."""
        bare = line
        while (said_by := SAID_BY.match(bare)) is not None:
            bare = bare[said_by.end() :]
        found = REASON.match(bare)
        if self._is_open:
            self.why, self._is_open = f"{self.why}: {bare.strip()}", False
        elif found is not None and not found["why"].startswith(CONSEQUENCES):
            self.why, self._is_open = bare.strip(), "validation error" in found["why"]
        self._in_usage = line.startswith("usage: ") or (self._in_usage and line.startswith(" "))
        return not self._in_usage


def main() -> None:
    sys.exit(run(sys.argv[1], sys.argv[2:]))


def run(name: str, command: Sequence[str]) -> int:
    """The server's exit status, or 128 + the signal that ended it."""
    parent, stopping = os.getppid(), StopRequest()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    linux = sys.platform.startswith("linux")
    preexec = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM) if linux else None
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0, preexec_fn=preexec
    )
    log = VllmLog()
    reading = threading.Thread(target=_relay, args=(server.stdout, log), daemon=True)
    reading.start()
    while server.poll() is None and os.getppid() == parent and not stopping.wait(LOOK_EVERY_S):
        pass
    ends_by_itself = server.poll() is not None
    if not ends_by_itself:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(TERM_S)
    _end_group(server.pid)
    code = server.wait()
    reading.join(TIDY_S)
    if ends_by_itself and log.why:
        sys.stderr.write(f"{name}: vLLM ended: {log.why}\n")
    return code if code >= 0 else 128 - code


def _relay(output: IO[bytes], log: VllmLog) -> None:
    for line in output:
        if log.passes(line.decode(errors="replace")):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


def _end_group(group: int) -> None:
    """First all but what tidies up after them."""
    for pid in _members(group):
        with suppress(OSError):
            if TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + TIDY_S
    with suppress(ProcessLookupError):  # raised when nothing is left of it
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(LOOK_EVERY_S)
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> Iterable[int]:
    """None where there is no /proc."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[2]) == group:
                yield int(entry.name)


if __name__ == "__main__":
    main()
