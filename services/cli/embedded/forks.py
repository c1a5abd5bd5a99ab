"""Processes that fork servers become, as a fleet's `Child` needs them, and the server of services. Linux alone.

What all services import is imported once and shared; the server of workers has torch, too.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from kvfleet.cli.embedded.processes import Process, popen
from kvservice import launch

LARGEST_MESSAGE = 4096
SHARED = (
    "kvproto.client", "kvproto.dataplane.server", "kvservice.data_plane", "kvservice.lifecycle",
    "kvservice.membership", "kvservice.metrics", "kvservice.tracing_start",
)  # fmt: skip
available = sys.platform == "linux"


@cache
def of_services() -> Forks:
    return Forks(lambda fd: popen(launch.command("kvfleet.cli.embedded.forks", str(fd)), {}, [fd]))


@cache
def of_workers() -> Forks:
    one_thread = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's would not be there after a fork
    server = lambda fd: of_services().start("kvfleet.worker.engine.forked", [str(fd)], one_thread, fd)  # noqa: E731
    return Forks(server, one_thread)


def begin(flags: Sequence[str]) -> None:
    """Start the servers before `kvfleet up` imports anything itself: their imports take longest."""
    if not available or "--help" in flags or find_spec("setproctitle") is None:
        return
    of_services().prepare()
    atexit.register(of_services().close)
    if not {"--runner=fake", "fake", "--engine=vllm", "vllm"} & set(flags) and find_spec("torch") is not None:
        of_workers().prepare()
        atexit.register(of_workers().close)


@dataclass(eq=False, slots=True)
class Forked:
    """One process. Before it is forked it has no pid, and ends with the server."""

    forks: Forks
    pid: int = 0
    returncode: int | None = None

    def poll(self) -> int | None:
        self.forks.hear()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        if self.pid:
            os.kill(self.pid, number)
        else:
            self.forks.send_signal(number)


@dataclass(eq=False, slots=True)
class Forks:
    """Owns a fork server and the state of its processes. Used by one thread.

    `begin` starts the server with the number of its end of the socket pair; each process's own variables go over `env`.
    A server that ends takes its processes with it; the next process starts a new server.
    """

    begin: Callable[[int], Process]
    env: Mapping[str, str] = field(default_factory=dict)
    server: Process | None = None
    channel: socket.socket | None = None
    unborn: list[Forked] = field(default_factory=list)
    living: dict[int, Forked] = field(default_factory=dict)

    def start(self, module: str, argv: Sequence[str], env: Mapping[str, str], fd: int | None = None) -> Forked:
        """Returns at once; the process begins when the server has imported everything. It has the socket `fd` under the
        same number."""
        channel = self.prepare()
        forked = Forked(self)
        self.unborn.append(forked)
        variables = {**os.environ, **self.env, **env}
        wanted = {"module": module, "argv": list(argv), "env": variables, "socket": fd}
        with contextlib.suppress(OSError):  # it just ended: the next look says so
            socket.send_fds(channel, [json.dumps(wanted).encode()], [] if fd is None else [fd])
        return forked

    def prepare(self) -> socket.socket:
        """Start a server, if none runs, so that it imports what its processes share."""
        self.hear()
        if self.channel is None:
            self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self.server = self.begin(theirs.fileno())
            self.channel.setblocking(False)
        return self.channel

    def hear(self) -> None:
        while self.channel is not None:
            try:
                said = self.channel.recv(LARGEST_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                said = b""
            if not said:
                self._server_ended()
                return
            message = json.loads(said)
            if "pid" in message:
                forked = self.unborn.pop(0)
                forked.pid = message["pid"]
                self.living[forked.pid] = forked
            else:
                self.living.pop(message["ended"]).returncode = message["code"]

    def send_signal(self, number: int) -> None:
        if self.server is not None:
            self.server.send_signal(number)

    def close(self) -> None:
        if self.channel is not None:
            self.send_signal(signal.SIGTERM)
            self._server_ended()

    def _server_ended(self) -> None:
        assert self.server is not None
        assert self.channel is not None
        self.channel.close()
        code = self.server.wait()
        for forked in (*self.unborn, *self.living.values()):
            forked.returncode = code or -signal.SIGTERM
        self.unborn, self.living = [], {}
        self.server = self.channel = None


def main() -> None:
    """The server of services. Its argument is the number of its socket."""
    from kvservice import fork_server  # needs setproctitle, which a bare installation lacks

    gc.disable()  # nothing of what is imported is garbage
    for module in SHARED:
        import_module(module)
    fork_server.serve(socket.socket(fileno=int(sys.argv[1])))
