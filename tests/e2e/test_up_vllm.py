"""`kvfleet up --engine vllm` with a real vLLM beside each of two workers: it serves, loses one, and leaves nothing.

Skipped where no vLLM is installed (make vllm-install, or KVFLEET_VLLM_PYTHON names its interpreter).
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.tiny_llama import write_tiny_llama
from tests.support.up import Up, alive, command_of
from tests.support.vllm_server import ENGINE, ENV, PACED, READY_S, ROOT, vllm_python
from tests.support.waiting import LIMIT_S, wait_until

SAMPLED = {"prompt": "O Romeo,", "max_tokens": 400, "temperature": 1.0, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    python = vllm_python()
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    state = tmp_path_factory.mktemp("state")
    up = Up(
        "--engine", "vllm", "--engine-python", python, "--model", str(model), "--served-model-name", "tiny",
        "--dtype", "float32", "--workers", "2", "--port", "0", "--state-dir", str(state),
        "--", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16", *PACED,
        env=ENV | {"PYTHONPATH": os.pathsep.join([str(ROOT / "libs"), str(ROOT)])},
    )  # fmt: skip
    try:
        yield up.wait_ready(READY_S)
    finally:
        up.stop(timeout_s=LIMIT_S)


def workers(fleet: Up) -> dict[str, Any]:
    known: dict[str, Any] = httpx.get(f"{fleet.base}/workers", trust_env=False).json()
    return known


def generated(fleet: Up, body: dict[str, Any], on_event: Callable[[str, int], None] = lambda *_: None) -> str:
    """The text. `on_event` is told the worker at which it began, and how many events have come."""
    at, events = "", 0
    with httpx.stream("POST", f"{fleet.base}/generate", json=body, timeout=LIMIT_S, trust_env=False) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            events += 1
            at = at or event.get("worker_id", "")
            on_event(at, events)
            if event["type"] == "done":
                return str(event["generated_text"])
    raise AssertionError(f"no end:\n{fleet.stderr}")


def test_it_serves(fleet: Up) -> None:
    assert {(one["state"], one["engine"]) for one in workers(fleet).values()} == {("ready", "vllm")}
    assert all(command_of(one["engine_pid"]).startswith(ENGINE) for one in workers(fleet).values())
    greedy = {"prompt": "O Romeo,", "max_tokens": 16, "temperature": 0}
    assert generated(fleet, greedy) == generated(fleet, greedy)
    assert "Traceback" not in fleet.stderr


def test_a_stream_outlives_its_vllm_which_comes_back(fleet: Up) -> None:
    before = workers(fleet)
    undisturbed = generated(fleet, SAMPLED)
    killed: list[str] = []

    def kill(worker: str, events: int) -> None:
        if events == 50:
            killed.append(worker)
            os.kill(before[worker]["engine_pid"], signal.SIGKILL)

    assert generated(fleet, SAMPLED, kill) == undisturbed
    (worker,) = killed
    others = {one["engine_pid"] for one in before.values()}

    def is_back() -> bool:
        now = workers(fleet)[worker]
        return now["state"] == "ready" and now["engine_pid"] not in others

    wait_until(is_back, READY_S - 60.0, told=lambda: f"{workers(fleet)[worker]}\n{fleet.stderr}", pause_s=0.5)
    assert workers(fleet)[worker]["pid"] == before[worker]["pid"]  # the worker waited for it
    assert generated(fleet, SAMPLED) == undisturbed


def test_a_drained_worker_hands_over_tokens_and_blocks(fleet: Up) -> None:
    """The stream goes on at the other one, which has its blocks from the vault, or from the one that goes."""
    body = {**SAMPLED, "prompt": "The story of a vault, told once more. " * 20, "max_tokens": 1400}
    wait_until(lambda: {one["state"] for one in workers(fleet).values()} == {"ready"}, READY_S)
    before, drained = workers(fleet), []

    def fetched(worker: str) -> int:
        tiers = workers(fleet)[worker]["load"]["tiers"]
        return sum(tiers[one]["hit_tokens_total"] for one in ("vault", "peer"))

    had = {worker: fetched(worker) for worker in before}

    def drain(worker: str, events: int) -> None:
        if events == 100:
            drained.append(worker)
            os.kill(before[worker]["pid"], signal.SIGTERM)

    moved = generated(fleet, body, drain)
    assert generated(fleet, body) == moved  # by the one that is left
    (other,) = before.keys() - set(drained)
    assert fetched(other) - had[other] > 400
    wait_until(lambda: "was drained" in fleet.stderr, LIMIT_S)


def test_nothing_is_left(fleet: Up) -> None:
    memory = Path("/dev/shm")
    processes = fleet.descendants()
    maps = [line for pid in processes for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    shared = {int(line.split()[4]) for line in maps if f"{memory}/" in line}  # inodes: another fleet may use the names
    assert shared
    assert fleet.stop(timeout_s=LIMIT_S) == 0
    assert [command_of(pid) for pid in processes if alive(pid)] == []
    assert shared.isdisjoint(path.stat().st_ino for path in memory.iterdir())
