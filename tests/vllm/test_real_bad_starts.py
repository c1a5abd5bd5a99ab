"""A vLLM server that was started without what a worker needs is refused, in one line that names the flags."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet.worker.vllm.vllm_sequence import Sockets
from kvfleet.worker.vllm.vllm_server import Expected, Unsuitable
from kvfleet.worker.vllm.vllm_server import VllmServer as VllmSide
from tests.support.vllm_server import NEEDED, VllmServer

EVENTS = "--kv-events-config"
AT_ONCE = {*NEEDED, EVENTS} - {"--enable-scale-out", "--kv-transfer-config"}  # told by the connector, or by requests


@pytest.mark.parametrize(
    ("without", "named"),
    [
        ({*NEEDED, EVENTS}, {"--enable-scale-out"}),
        ({"--kv-transfer-config"}, {"--kv-transfer-config"}),
        (AT_ONCE, AT_ONCE - {"--no-async-scheduling"}),  # vLLM has it off by itself where it runs on processors
    ],
    ids=["as vLLM comes", "no connector", "a connector alone"],
)
async def test_one_line_names_the_flags(
    tiny_llama: Path, tmp_path: Path, without: Collection[str], named: Collection[str]
) -> None:
    server = VllmServer(tiny_llama, tmp_path, without=without)
    try:
        server.wait_ready()
        sockets = Sockets(str(tmp_path / "news"), str(tmp_path / "draws"))
        side = VllmSide(TokenRoutes(server.url), sockets, Expected(16, None, "auto"), pytest.fail)
        await side.open()
        with pytest.raises(Unsuitable) as refused:
            await side.find()
        await side.close()
    finally:
        server.stop()
    told = str(refused.value)
    assert "\n" not in told
    assert set(re.findall(r"--[a-z-]+", told)) == set(named), told
