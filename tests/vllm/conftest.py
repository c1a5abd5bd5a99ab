"""One vLLM server for all tests of a run: it takes half a minute to start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvfleet.worker.vllm.token_routes import TokenRoutes
from tests.support.tiny_llama import write_tiny_llama
from tests.support.vllm_server import NICENESS, PACED, VllmServer, session, vllm_python


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()  # skips before it writes
    return write_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def vllm_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(tiny_llama, tmp_path_factory.mktemp("vllm"), *PACED, niceness=NICENESS)
    try:
        yield server.wait_ready()
    finally:
        status = server.stop()
    assert status == 0, server.log[-4000:]
    assert session(server.guard_pid) == []


@pytest.fixture
async def routes(vllm_server: VllmServer) -> AsyncIterator[TokenRoutes]:
    routes = TokenRoutes(vllm_server.url)
    await routes.open()
    yield routes
    await routes.close()
