"""Child processes of an embedded fleet: none outlives the fleet, and they stop in order, within a time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

PR_SET_PDEATHSIG = 1
MOST_RESTARTS = 3
RESTART_WINDOW_S = 60.0


class StartFailed(Exception):
    def __init__(self, process: str, why: str) -> None:
        super().__init__(f"{process} could not start: {why}")


class FleetEnded(Exception):
    """The fleet cannot go on; says why."""


@dataclass(slots=True)
class StopRequest:
    """Set by a signal's handler. A threading.Event would deadlock: the interrupted code may hold its lock."""

    is_set: bool = False

    def set(self) -> None:
        self.is_set = True

    def wait(self, seconds: float) -> bool:
        if not self.is_set:
            time.sleep(seconds)
        return self.is_set


class Process(Protocol):
    """As `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


@dataclass(slots=True)
class Child:
    """One process, started at once. `given_up` once it ended too often."""

    name: str
    start: Callable[[], Process]
    process: Process = field(init=False)
    given_up: bool = False
    restarts: list[float] = field(default_factory=list)
    model: str = ""  # of a worker
    draining: bool = False  # as the autoscaler told it
    engine: Child | None = None  # of a worker, where it is a process of its own

    def __post_init__(self) -> None:
        self.process = self.start()

    def start_again(self, now: float) -> bool:
        """False, and given up, after MOST_RESTARTS within the window."""
        self.restarts = [at for at in self.restarts if now - at < RESTART_WINDOW_S]
        if len(self.restarts) >= MOST_RESTARTS:
            self.given_up = True
            return False
        self.restarts.append(now)
        self.process = self.start()
        return True

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


def spawn(
    name: str, command: Sequence[str], env: Mapping[str, str] | None = None, sockets: Sequence[int] = ()
) -> Child:
    """Start a process in a session of its own (Ctrl-C reaches only the parent); its stdout goes to our stderr."""
    return Child(name, lambda: popen(command, env or {}, sockets))


def ends_with_parent() -> Callable[[], object] | None:
    """What a child does first, where the kernel then ends it if its parent is killed."""
    if not sys.platform.startswith("linux"):
        return None
    return partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)


def popen(command: Sequence[str], env: Mapping[str, str], sockets: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        env={**os.environ, **env},
        pass_fds=sockets,
        start_new_session=True,
        preexec_fn=ends_with_parent(),
    )


def stop(groups: Iterable[Sequence[Child]], within_s: float) -> None:
    """SIGTERM group after group, SIGKILL for what is left when the time is over."""
    end = time.monotonic() + within_s
    waiting = [list(group) for group in groups]
    for position, group in enumerate(waiting):
        for child in group:
            child.signal(signal.SIGTERM)
        share = (end - time.monotonic()) / (len(waiting) - position)
        group_end = time.monotonic() + max(share, 0.1)
        for child in group:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, group_end - time.monotonic()))
    for group in waiting:
        for child in group:
            if child.running:
                child.kill()
