"""Probes over a process's life, and the health check that containers run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvservice import health
from kvservice.lifecycle import Lifecycle
from kvservice.metrics import STUCK_S, Probes, Reading
from kvservice.settings import ServiceSettings


@pytest_asyncio.fixture
async def life() -> AsyncIterator[Lifecycle]:
    made = Lifecycle()
    yield made
    await made.close()


async def ask(port: int | None, path: str) -> int | None:
    assert port is not None
    return await asyncio.to_thread(health.status_of, port, path)


async def test_alive_while_loading_ready_later_and_not_while_stopping(life: Lifecycle) -> None:
    probes = Probes(ServiceSettings(metrics_port=0), life)
    assert (await ask(probes.port, "/livez"), await ask(probes.port, "/readyz")) == (200, 503)
    assert await ask(probes.port, "/metrics") == 200  # nothing to show yet is no fault
    probes.ready([Reading("kvfleet_things_total", "things", lambda: 1.0)])
    assert (await ask(probes.port, "/livez"), await ask(probes.port, "/readyz")) == (200, 200)
    life.stop()
    assert (await ask(probes.port, "/livez"), await ask(probes.port, "/readyz")) == (200, 503)


async def test_a_stuck_event_loop_is_not_alive(life: Lifecycle) -> None:
    probes = Probes(ServiceSettings(metrics_port=0), life)
    beat = life.spawn(life.beat(), "beat")
    await asyncio.sleep(0)
    assert life.idle_s < 1.0
    beat.cancel()
    life._beat_at -= STUCK_S
    assert await ask(probes.port, "/livez") == 503
    again = life.spawn(life.beat(), "beat")
    await asyncio.sleep(0)
    assert await ask(probes.port, "/livez") == 200
    again.cancel()


async def test_the_health_check_says_what_is_wrong(life: Lifecycle, capsys: pytest.CaptureFixture[str]) -> None:
    probes = Probes(ServiceSettings(metrics_port=0), life)
    environment = {"KVFLEET_METRICS_PORT": str(probes.port), "KVFLEET_PORT": "1"}
    assert await asyncio.to_thread(health.main, [], environment) == 1
    assert f"port {probes.port}/readyz: 503" in capsys.readouterr().err
    assert await asyncio.to_thread(health.main, ["--path", "/livez"], environment) == 0
    probes.ready([])
    assert await asyncio.to_thread(health.main, [], environment) == 0
    assert await asyncio.to_thread(health.main, ["--port", "1"], environment) == 1
    assert "port 1/readyz: no answer" in capsys.readouterr().err


def test_an_ingress_is_asked_at_its_own_port() -> None:
    assert health.port_of({"KVFLEET_PORT": "9000"}) == 9000
    assert health.port_of({}) == 8080


async def test_without_a_port_there_are_no_probes(life: Lifecycle) -> None:
    probes = Probes(ServiceSettings(), life)
    probes.ready([])
    assert probes.port is None
