"""A worker's side of a vLLM server beside a double of the server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from kvfleet.worker.vllm import vllm_server
from tests.support import vllm_rig
from tests.support.vllm_rig import Starts, VllmRig


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks often for a server that is away."""
    monkeypatch.setattr(vllm_server, "PERIOD_S", 0.02)


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


@pytest.fixture
async def rig(starts: Starts) -> VllmRig:
    return await starts()
