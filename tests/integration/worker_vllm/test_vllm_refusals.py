"""A worker that cannot serve what it was sent to says so in one line, and was never a member of the fleet."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvproto.client import Client
from tests.support.processes import KVFLEET
from tests.support.vllm_worker import VllmFleet

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "served name": ({"served_model_name": "other"}, "served_model_name: vLLM serves 'demo', not 'other'"),
    "dtype": ({"dtype": "bfloat16"}, "dtype: vLLM computes in float32"),
    "block size": ({"block_size": 20}, "block_size: vLLM's blocks of 32 tokens are not made of 20"),
    "eviction": ({"eviction": "reuse"}, "vLLM evicts its blocks by itself, by least recent use"),
    "public prefixes": ({"public_prefixes_file": Path("/none")}, "vLLM workers share no cache among tenants"),
    "no model": ({"model": "/no/such/folder"}, "/no/such/folder"),
}


def is_nobody(client: Client) -> bool:
    return not client.members.view.workers


@pytest.mark.parametrize("case", CASES)
async def test_settings_that_vllm_contradicts(vllm_fleet: VllmFleet, client: Client, case: str) -> None:
    settings, says = CASES[case]
    worker = await vllm_fleet.start("v0", **settings)
    assert says in worker.refusal
    assert len(worker.refusal.splitlines()) == 1
    assert is_nobody(client)


async def test_another_model_than_vllms(vllm_fleet: VllmFleet, client: Client, other_folder: Path) -> None:
    worker = await vllm_fleet.start("v0", model=str(other_folder))
    assert "is another model than vLLM's" in worker.refusal
    assert is_nobody(client)


async def test_the_port_of_nats(vllm_fleet: VllmFleet, client: Client, nats_url: str) -> None:
    worker = await vllm_fleet.start("v0", engine_url=f"http://{urlsplit(nats_url).netloc}")
    assert "is no vLLM" in worker.refusal
    assert len(worker.refusal.splitlines()) == 1
    assert is_nobody(client)


async def test_a_process_says_it_once_and_ends(vllm_fleet: VllmFleet, nats_url: str) -> None:
    worker = await vllm_fleet.start("v0", {"other_facts": {"scheduling_policy": "fcfs", "max_logprobs": 20}})
    process = await asyncio.create_subprocess_exec(
        KVFLEET, "worker", "--id=v1", "--engine=vllm", f"--engine-url={worker.double.url}", f"--nats-url={nats_url}",
        f"--namespace={vllm_fleet.namespace}",
        env=os.environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert output.decode().splitlines() == [
        f"kvfleet worker: vLLM at {worker.double.url} was started without: --scheduling-policy priority, "
        "--max-logprobs 129"
    ]
    assert worker.refusal == output.decode().strip().removeprefix("kvfleet worker: ")
