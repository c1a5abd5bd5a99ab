"""A process that runs one vLLM server, and ends with it. Its arguments: a worker's name, the file of vLLM's log (- for
stderr), and the server's command.

    SIGTERM, or its owner is gone ──▶ SIGTERM to the server ── TERM_S ──▶ SIGKILL to its group
    the server ended by itself ─────────────────────────────────────────▶ SIGKILL to its group

vLLM is several processes, which a killed server leaves behind: they are a group in this one's session. If it ends by
itself, the line of its log that says why goes to stderr.
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
from typing import IO, BinaryIO

from kvfleet.cli.embedded.processes import PR_SET_PDEATHSIG, StopRequest

TERM_S = 2.5
TIDY_S = 0.5
LOOK_EVERY_S = 0.05
RECENT_S = 60.0  # a crowded machine has taken 20 s to end a server that had said why
TRACKER = b"resource_tracker"  # Python's: it ignores SIGTERM, and frees shared memory when all others are gone
SAID_BY = re.compile(r"^\([\w-]+ pid=\d+\) |^ERROR \S+ \S+ \[[^]]+\] ")
REASON = re.compile(r"^(?:\S+: error: |(?:\w+\.)*\w*(?:Error|Exception): )(?P<why>.*)")
OF_A_REQUEST = "[serving.py:"
CONSEQUENCES = ("Engine core initialization failed", "Worker failed with error", "EngineCore encountered an issue")


@dataclass(slots=True)
class LastError:
    """Of a log that is read line by line: the last error that no other one led to."""

    why: str = ""
    at_s: float = 0.0
    _is_open: bool = False  # it goes on in the next line

    def read(self, line: str, now_s: float) -> None:
        if OF_A_REQUEST in line:
            return
        bare = line
        while (said_by := SAID_BY.match(bare)) is not None:
            bare = bare[said_by.end() :]
        found = REASON.match(bare)
        if self._is_open:
            self.why, self._is_open = f"{self.why}: {bare.strip()}", False
        elif found is not None and not found["why"].startswith(CONSEQUENCES):
            self.why, self.at_s, self._is_open = bare.strip(), now_s, "validation error" in found["why"]

    def reason(self, ended_s: float) -> str:
        """Why it ended, if an error not long before says so."""
        return self.why if ended_s - self.at_s < RECENT_S else ""


def main() -> None:
    name, log, *command = sys.argv[1:]
    if log == "-":
        sys.exit(run(name, sys.stderr.buffer, command))
    with open(log, "ab") as file:
        sys.exit(run(name, file, command))


def run(name: str, log: BinaryIO, command: Sequence[str]) -> int:
    """The server's exit status, or 128 + the signal that ended it."""
    parent, stopping = os.getppid(), StopRequest()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    linux = sys.platform.startswith("linux")
    preexec = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM) if linux else None
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0, preexec_fn=preexec
    )
    error = LastError()
    reading = threading.Thread(target=_relay, args=(server.stdout, log, error), daemon=True)
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
    if ends_by_itself and (why := error.reason(time.monotonic())):
        sys.stderr.write(f"{name}: vLLM ended: {why}\n")
    return code if code >= 0 else 128 - code


def _relay(output: IO[bytes], log: BinaryIO, error: LastError) -> None:
    for line in output:
        error.read(line.decode(errors="replace"), time.monotonic())
        log.write(line)
        log.flush()


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
