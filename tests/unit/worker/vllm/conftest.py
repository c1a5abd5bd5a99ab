"""A worker's side of a vLLM server beside a double of the server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.support import vllm_rig
from tests.support.vllm_rig import VllmRig

Starts = Callable[..., Awaitable[VllmRig]]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds to be sure of takes tenths of them."""
    module = "kvfleet.worker.vllm.vllm_server."
    for name, value in {
        "PERIOD_S": 0.02,
        "HELLO_S": 0.2,
        "HANG_S": 0.3,
        "PROBE_S": 2.0,
        "EVENTS_S": (0.1, 0.2),
    }.items():
        monkeypatch.setattr(module + name, value)


@pytest.fixture
async def starts(quick: None) -> AsyncIterator[Starts]:
    """`starts(**made)`; all have one root."""
    rigs: list[VllmRig] = []
    root = os.urandom(16)

    async def start(**made: object) -> VllmRig:
        rigs.append(await vllm_rig.start(root=root, **made))
        return rigs[-1]

    yield start
    for rig in rigs:
        await rig.close()
        await rig.server.close()


@pytest.fixture
async def rig(starts: Starts) -> VllmRig:
    return await starts()
