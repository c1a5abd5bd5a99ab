"""A compose project that runs: its containers by service, its address, its API key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from kvproto.testing.docker_daemon import client
from tests.support.native_stream import native_stream
from tests.support.waiting import wait_until

SERVICE = "com.docker.compose.service"
PROJECT = "com.docker.compose.project"


class ComposeFleet:
    def __init__(self, project: str, base: str, secrets: Path) -> None:
        self.base = base
        self.api_key = (secrets / "api-key.txt").read_text().strip()
        self._daemon = client()
        self._project = project

    def close(self) -> None:
        self._daemon.close()

    def containers(self, service: str | None = None) -> list[Any]:
        """All of them, ended ones too, or a service's."""
        labels = [f"{PROJECT}={self._project}"] + ([f"{SERVICE}={service}"] if service else [])
        found: list[Any] = self._daemon.containers.list(all=True, filters={"label": labels})
        return found

    def worker_container(self, worker: str) -> Any:
        """The container that a worker's id stands for: its host is the container's name in there."""
        listed = httpx.get(f"{self.base}/workers", headers=self.headers).json()
        return next(one for one in self.containers("worker") if one.id.startswith(listed[worker]["host"]))

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.base}/stats", headers=self.headers).json()["ingress"]
        return found

    def ready_workers(self) -> list[str]:
        listed = httpx.get(f"{self.base}/workers", headers=self.headers).json()
        return [name for name, worker in listed.items() if worker["state"] == "ready"]

    def wait(self, what: Callable[[], bool], timeout_s: float, told: str) -> None:
        wait_until(what, timeout_s, told=told, pause_s=0.2)


def service_of(container: Any) -> str:
    return str(container.labels[SERVICE])


def greedy(
    base: str,
    prompt: str,
    count: int,
    headers: dict[str, str] | None = None,
    on_token: Callable[[str, int], None] | None = None,
) -> tuple[list[int], dict[str, Any]]:
    """A greedy `/generate` stream: token ids and the terminal event. `on_token(worker, tokens so far)`."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    came = native_stream(base, body, headers, on_token, timeout_s=120)
    return came.ids, came.end
