"""The backend of a test run, by NATS_TEST_BACKEND: `docker`, `process`, or `auto` (default).

`auto` takes a container where a Docker daemon answers, else a process, and says why. `docker` fails without a daemon.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvproto.testing.nats_process import NatsProcess
from kvproto.testing.nats_server import NatsServer, ServerSpec

BACKENDS = ("auto", "docker", "process")


class ServerSource:
    """Starts servers for one test run, all on the same backend."""

    def __init__(self, wanted: str | None = None) -> None:
        self.wanted = wanted or os.environ.get("NATS_TEST_BACKEND") or "auto"
        if self.wanted not in BACKENDS:
            raise ValueError(f"NATS_TEST_BACKEND is {self.wanted!r}, must be one of {', '.join(BACKENDS)}")
        self._why_process = "asked for" if self.wanted == "process" else ""

    def start(self, make_directory: Callable[[], Path], spec: ServerSpec | None = None) -> NatsServer:
        """A running server. Raises if it cannot start."""
        spec = spec or ServerSpec()
        if not self._why_process:
            try:
                from kvproto.testing.nats_container import NatsContainer

                return NatsContainer.start(spec)
            except Exception as error:  # for any failure of a container there is the process
                if self.wanted == "docker":
                    raise
                self._why_process = f"no container: {_first_line(error)}"
        process = NatsProcess(make_directory(), spec)
        process.start()
        return process

    def describe(self, server: NatsServer) -> str:
        return f"process ({self._why_process})" if server.kind == "process" else server.kind


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
