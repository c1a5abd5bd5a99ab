"""Clients that nobody here wrote, unmodified, against a fleet of own workers with the demo model and API keys."""

from __future__ import annotations

import pytest

from tests.clients.client_scripts import Clients, checks, script_of

SCRIPTS = (
    "openai_chat", "openai_tools", "openai_responses", "anthropic_messages", "litellm_both", "langchain_both",
    "pydantic_ai_agents", "instructor_modes", "lm_eval_run", "aiperf_profile", "guidellm_run", "vllm_bench",
)  # fmt: skip


@pytest.mark.parametrize(("script", "check"), checks(*SCRIPTS))
def test_client(clients: Clients, script: str, check: str) -> None:
    clients.passes(script, check)


@pytest.mark.parametrize("script", SCRIPTS)
def test_talks_to_nobody_else(clients: Clients, script: str) -> None:
    assert clients.run(script, script_of(script)).outside == []
