"""Loop: one member of a chaos fleet: its process, its way to NATS, its way to others' blocks, and its clock.

down ──start──▶ up ──kill, drain, its own end──▶ down (the supervisor starts it again, as Kubernetes would)
                └──stop──▶ stopped ──wake──▶ up
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.layout import Place
from tests.support.nats_proxy import NatsProxy
from tests.support.slow_proxy import SlowProxy

ROOT = Path(__file__).parents[2]


class MemberProcess:
    """Owned by the fleet. `asked` says how it was told to end, until it has."""

    def __init__(
        self,
        place: Place,
        flags: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        proxy: NatsProxy,
        data_plane: SlowProxy | None,
    ) -> None:
        self.place = place
        self.proxy = proxy
        self.data_plane = data_plane
        self.version = 1
        self.asked = ""
        self.asked_at = 0.0
        self.stopped = False
        self.starts = 0
        self.log = folder / f"{place.name}.log"
        self._flags = list(flags)
        self._env = dict(env)
        self._clock = folder / f"{place.name}.clock"
        self._clock.write_bytes(struct.pack("d", 0.0))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        assert not self.is_running
        options = [f"--chaos-clock={self._clock}", f"--chaos-version={self.version}"]
        if self.data_plane is not None:
            options.append(f"--chaos-data-plane={self.data_plane.address}")
        own = [f"--id={self.place.name}", f"--nats-url={self.proxy.url}", f"--parent-pid={os.getpid()}"]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.member", self.place.role.value, *options, *own, *self._flags],
                cwd=ROOT,
                env={**os.environ, **self._env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.asked, self.stopped = "", False
        self.starts += 1

    def ended(self) -> int | None:
        """Its exit code, once, after it has ended."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None
        return code

    def kill(self) -> None:
        self._ask("kill", signal.SIGKILL)

    def drain(self) -> None:
        self._ask("drain", signal.SIGTERM)

    def stop(self) -> None:
        self.stopped = True
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)
        self.stopped = False

    def shift_clock(self, seconds: float) -> None:
        with self._clock.open("r+b") as file:
            file.write(struct.pack("d", seconds))

    def last_words(self, characters: int = 1500) -> str:
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""

    def _ask(self, how: str, number: signal.Signals) -> None:
        if self.is_running:
            self.asked, self.asked_at = how, time.monotonic()
            self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
