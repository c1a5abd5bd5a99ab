"""Adapters of a real vLLM as models of the fleet: `kvfleet up --engine vllm --lora`, and `kvfleet lora` while it runs.

Skipped where no vLLM is installed (make vllm-install, or KVFLEET_VLLM_PYTHON names its interpreter).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.lora_adapter import write_adapter
from tests.support.processes import KVFLEET
from tests.support.tiny_llama import write_tiny_llama
from tests.support.up import Up
from tests.support.vllm_server import ENV, READY_S, vllm_python
from tests.support.waiting import LIMIT_S, wait_until

PROMPT = "Two households, both alike in dignity, in fair Verona, where we lay our scene, from ancient grudge. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()  # skips before it writes
    folder = tmp_path_factory.mktemp("lora")
    write_tiny_llama(folder / "tiny")
    for seed, name in enumerate(("red", "blue", "late"), 1):
        write_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(
        "--engine", "vllm", "--engine-python", vllm_python(), "--model", str(folder / "tiny"), "--dtype", "float32",
        "--workers", "1", "--port", "0", "--state-dir", str(tmp_path_factory.mktemp("state")),
        "--lora", f"red={folder / 'red'}", "--lora", f"blue={folder / 'blue'}",
        "--", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16", env=ENV,
    )  # fmt: skip
    try:
        yield up.wait_ready(READY_S)
    finally:
        up.stop(timeout_s=LIMIT_S)


def models(fleet: Up) -> dict[str, str | None]:
    """Parents by name."""
    listed = httpx.get(f"{fleet.base}/v1/models", trust_env=False).json()["data"]
    return {one["id"]: one["parent"] for one in listed}


def asked(fleet: Up, model: str, prompt: str = PROMPT) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    return httpx.post(f"{fleet.base}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False)


def answered(fleet: Up, model: str, prompt: str = PROMPT) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    found: dict[str, Any] = asked(fleet, model, prompt).raise_for_status().json()
    return found["choices"][0]["text"], found["kvfleet"]["cached_tokens"]


def lora(fleet: Up, *words: str) -> subprocess.CompletedProcess[str]:
    command = [KVFLEET, "lora", *words, "--nats-url", fleet.nats_url]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def test_adapters_are_models_with_answers_and_blocks_of_their_own(fleet: Up) -> None:
    assert models(fleet) == {"tiny": None, "red": "tiny", "blue": "tiny"}
    first = {name: answered(fleet, name) for name in ("tiny", "red", "blue")}
    again = {name: answered(fleet, name) for name in first}
    assert {cached for _, cached in first.values()} == {0}
    assert min(cached for _, cached in again.values()) >= 64
    assert {name: text for name, (text, _) in again.items()} == {name: text for name, (text, _) in first.items()}
    assert len({text for text, _ in first.values()}) == 3
    (worker,) = httpx.get(f"{fleet.base}/workers", trust_env=False).json().values()
    assert worker["adapters"] == ["red", "blue"]
    assert worker["load"]["blocks_addressed"] >= 3 * 64 / 16  # vLLM's events of all three have our names


def test_loaded_and_unloaded_at_run_time(fleet: Up, folder: Path) -> None:
    refused = asked(fleet, "late")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    done = lora(fleet, "late", str(folder / "late"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "w0\n", "")
    wait_until(lambda: "late" in models(fleet))
    text, cached = answered(fleet, "late")
    assert cached == 0
    assert text not in {answered(fleet, name)[0] for name in ("tiny", "red", "blue")}
    assert answered(fleet, "late")[1] >= 64
    done = lora(fleet, "late", "--unload")
    assert (done.returncode, done.stdout) == (0, "w0\n")
    wait_until(lambda: "late" not in models(fleet))
    refused = asked(fleet, "late")
    assert (refused.status_code, "'late'" in refused.text) == (404, True)
    # Another adapter of that name shares nothing with it, though its path is the same.
    write_adapter(folder / "late", 9)
    assert lora(fleet, "late", str(folder / "late")).returncode == 0
    wait_until(lambda: "late" in models(fleet))
    other, cached = answered(fleet, "late")
    assert (cached, other == text) == (0, False)


@pytest.mark.parametrize(
    ("name", "made", "says"),
    [
        ("red", {"seed": 1}, "'red' is loaded already"),
        ("tiny", {"seed": 1}, "conflicts with a served base model"),
        ("high", {"seed": 5, "rank": 16}, "LoRA rank 16 is greater than max_lora_rank 8"),
        ("wide", {"seed": 5, "hidden": 512}, "is an adapter of another model: of width 512, not 256"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(
    fleet: Up, tmp_path: Path, name: str, made: dict[str, Any], says: str
) -> None:
    before = models(fleet)
    done = lora(fleet, name, str(write_adapter(tmp_path / name, **made)))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert says in done.stderr
    assert models(fleet) == before


def test_a_folder_that_is_not_there(fleet: Up) -> None:
    done = lora(fleet, "nowhere", "/nowhere")
    assert (done.returncode, "No adapter found for /nowhere" in done.stderr) == (1, True)
