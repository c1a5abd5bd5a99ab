"""Clients that nobody here wrote, unmodified, against a fleet of own workers with the demo model and API keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from tests.clients.client_scripts import Clients, checks, need_clients, new_key
from tests.support.up import Up

SCRIPTS = (
    "openai_chat", "openai_tools", "openai_responses", "anthropic_messages", "litellm_both", "langchain_both",
    "pydantic_ai_agents", "instructor_modes", "lm_eval_run", "aiperf_profile", "guidellm_run", "vllm_bench",
)  # fmt: skip
PENDING: dict[str, str] = {}


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Clients]:
    need_clients(pytestconfig)
    folder = tmp_path_factory.mktemp("clients")
    key = new_key(keys := folder / "keys.toml")
    fleet = Up("--port", "0", "--dtype", "float32", "--api-keys-file", str(keys))
    try:
        base = fleet.wait_ready().base
        yield Clients(base, key, "demo", DEMO_FOLDER, folder)
    finally:
        fleet.stop()
    assert "Traceback" not in fleet.stderr


@pytest.mark.parametrize(("script", "check"), checks(*SCRIPTS, pending=PENDING))
def test_client(clients: Clients, script: str, check: str) -> None:
    clients.passes(script, check)


@pytest.mark.parametrize("script", SCRIPTS)
def test_talks_to_nobody_else(clients: Clients, script: str) -> None:
    assert clients.went_outside(script) == []
