"""The same clients against a fleet of vLLM workers: what they ask of grammars, log probabilities and streams.

Skipped where no vLLM is installed (make vllm-install), or no clients (make client-install).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.client_scripts import Clients, checks, need_clients, new_key
from tests.support.tiny_llama import write_tiny_llama
from tests.support.up import Up
from tests.support.vllm_server import ENV, READY_S, vllm_python
from tests.support.waiting import LIMIT_S

SCRIPTS = ("openai_chat", "openai_tools", "openai_responses", "anthropic_messages")


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Clients]:
    need_clients(pytestconfig)
    python = vllm_python()
    folder = tmp_path_factory.mktemp("clients")
    model = write_tiny_llama(folder)
    key = new_key(keys := folder / "keys.toml")
    fleet = Up(
        "--engine", "vllm", "--engine-python", python, "--model", str(model), "--served-model-name", "tiny",
        "--dtype", "float32", "--workers", "1", "--port", "0", "--api-keys-file", str(keys),
        "--", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16", env=ENV,
    )  # fmt: skip
    try:
        yield Clients(fleet.wait_ready(READY_S).base, key, "tiny", model, folder)
    finally:
        fleet.stop(timeout_s=LIMIT_S)
    assert "Traceback" not in fleet.stderr


@pytest.mark.parametrize(("script", "check"), checks(*SCRIPTS))
def test_client(clients: Clients, script: str, check: str) -> None:
    clients.passes(script, check)
