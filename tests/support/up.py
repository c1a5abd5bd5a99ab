"""`kvfleet up` as a user starts it: a process whose stdout, stderr and children a test can look at."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import KVFLEET


class Up:
    """One `kvfleet up`. `base` is the ready line's URL, `nats_url` the one from the hint on stderr. `kvfleet`: the
    command, or its words where it is not installed."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None, kvfleet: str | Sequence[str] = KVFLEET) -> None:
        self.stderr_lines: list[str] = []
        self.stdout_lines: list[str] = []
        command = [*([kvfleet] if isinstance(kvfleet, str) else kvfleet), "up", *flags]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})},
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.stdout_lines), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.stderr_lines), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: object, lines: list[str]) -> None:
        with stream:  # type: ignore[attr-defined]
            for line in stream:  # type: ignore[attr-defined]
                lines.append(line.rstrip("\n"))

    @property
    def stderr(self) -> str:
        return "\n".join(self.stderr_lines)

    @property
    def base(self) -> str:
        return self.stdout_lines[0].removeprefix("ready ")

    @property
    def nats_url(self) -> str:
        found = re.search(r"nats://[0-9.]+:[0-9]+", self.stderr)
        assert found, self.stderr
        return found.group()

    def wait_ready(self, timeout_s: float = 120.0) -> Up:
        end = time.monotonic() + timeout_s
        while not (self.stdout_lines and "nats://" in self.stderr):
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise AssertionError(f"not ready (exit {self.process.returncode}):\n{self.stderr}")
            time.sleep(0.05)
        return self

    def descendants(self) -> list[int]:
        """Pids of all processes below it, itself excluded."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except (OSError, IndexError):
                    continue
                children.setdefault(parent, []).append(int(entry.name))
        found: list[int] = []
        todo = [self.process.pid]
        while todo:
            for child in children.get(todo.pop(), []):
                found.append(child)
                todo.append(child)
        return found

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 15.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler says where it stands
            self.process.wait()
            self._join()
            raise AssertionError(
                f"it goes on {timeout_s:.0f} s after {signal.Signals(number).name}:\n{self.stderr}"
            ) from None
        self._join()
        return code

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(2)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def command_of(pid: int) -> str:
    """ "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
