"""Loop: the vLLM servers of a chaos fleet, one beside each worker, and what starts them again.

starting ──/health 200──▶ up ──kill, its own end──▶ starting, whatever its exit status is
                          └──stop──▶ stopped ──wake──▶ up
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import httpx

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from tests.chaos.layout import REAL
from tests.support.vllm_server import ENGINE, NICENESS, VllmServer

PERIOD_S = 0.1
# So few blocks that some are evicted, and sequences preempted; they hold one that fills the context.
FLAGS = ("--max-model-len", "2048", "--num-gpu-blocks-override", "96")


class Vllm:
    """One server. `starts` counts its lives; `asked`: it was told to end, and has not yet."""

    def __init__(self, folder: Path) -> None:
        self._server = VllmServer(DEMO_FOLDER, folder, *FLAGS, name=REAL, niceness=NICENESS)
        self._answers = False
        self._stopped = False
        self.asked = False
        self.starts = 1

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def is_up(self) -> bool:
        return self._answers and not self.asked and not self._stopped

    def kill(self, process: str) -> None:
        """The others of it end by themselves."""
        if (pid := self._server.pids.get(process)) is not None:
            self.asked = True
            os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        self.asked = True
        self._server.kill_processes()

    def stop(self) -> None:
        self._stopped = True
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)
        self._stopped = False

    def last_words(self, characters: int = 3000) -> str:
        return self._server.log[-characters:]

    def ended(self) -> int | None:
        return self._server.status

    def start(self) -> None:
        self._answers = self.asked = False
        self._server.start()
        self.starts += 1

    async def look(self, http: httpx.AsyncClient) -> None:
        if not self._answers and not self.asked:
            with suppress(httpx.HTTPError):
                self._answers = (await http.get(f"{self.url}/health")).status_code == 200

    def close(self) -> None:
        self.wake()
        self._server.kill()

    def _signal(self, number: signal.Signals) -> None:
        if (pid := self._server.pids.get(ENGINE)) is not None:
            os.kill(pid, number)


class VllmServers:
    """By their workers' names. `on_end(name, status, log)`: of one that ended by itself."""

    def __init__(self, folder: Path, on_end: Callable[[str, int, str], None]) -> None:
        self._folder = folder
        self._on_end = on_end
        self._servers: dict[str, Vllm] = {}
        self._supervisor: asyncio.Task[None] | None = None

    def __getitem__(self, name: str) -> Vllm:
        return self._servers[name]

    def start(self, names: Iterable[str]) -> None:
        self._servers = {name: Vllm(self._folder) for name in names}
        self._supervisor = asyncio.create_task(self._supervise(), name="vllm-supervisor")

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        for server in self._servers.values():
            await asyncio.to_thread(server.close)

    async def _supervise(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as http:
            while True:
                for name, server in self._servers.items():
                    if (code := server.ended()) is None:
                        await server.look(http)
                        continue
                    if not server.asked:
                        self._on_end(f"vLLM of {name}", code, server.last_words())
                    server.start()
                await asyncio.sleep(PERIOD_S)
