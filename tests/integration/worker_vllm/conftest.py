"""A fleet of workers beside doubles of vLLM servers, on a real NATS server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.vllm import vllm_server
from kvproto.subjects import Subjects
from tests.support.vllm_worker import VllmFleet


@pytest.fixture
async def vllm_fleet(
    nats_url: str, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[VllmFleet]:
    monkeypatch.setattr(vllm_server, "PERIOD_S", 0.05)
    fleet = VllmFleet(nats_url, fleet_buckets.namespace)
    yield fleet
    await fleet.stop()


@pytest.fixture
def other_folder(tmp_path: Path) -> Path:
    """The demo model but for one number."""
    folder = tmp_path / "other"
    folder.mkdir()
    for path in DEMO_FOLDER.iterdir():
        text = path.read_bytes()
        (folder / path.name).write_bytes(text.replace(b'"rms_norm_eps": ', b'"rms_norm_eps": 1'))
    return folder
