"""What a worker makes of the server that it is sent to: it waits, takes it, or says in one line what is wrong."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.vllm import vllm_server
from kvfleet.worker.vllm.foreign_blocks import ForeignHash
from kvfleet.worker.vllm.vllm_server import Expected, VllmServer
from kvfleet_vllm.wire import VERSION, WorkerHello, encode
from kvproto.errors import KvfleetError, Unavailable
from kvproto.tasks import end
from kvproto.testing.nats_process import free_port
from tests.support.vllm_double import server as double_server
from tests.support.vllm_double.event_publisher import EventPublisher
from tests.support.vllm_double.server import VllmDouble, made
from tests.support.vllm_rig import USUAL, server_at
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("quick")

NO_FLAG = {
    "scheduling_policy": "fcfs",
    "enable_prefix_caching": False,
    "async_scheduling": True,
    "max_logprobs": 20,
    "logits_processors": None,
    "kv_events": None,
}
FLAGS = (
    "--scheduling-policy priority",
    "--enable-prefix-caching",
    "--no-async-scheduling",
    "--max-logprobs 129",
    "--logits-processors kvfleet_vllm.sampler:Sampler",
    "--kv-events-config",
)


@pytest.fixture
async def double() -> AsyncIterator[VllmDouble]:
    """Started when a test has spoilt it."""
    double = VllmDouble(made(DEMO_FOLDER))
    yield double
    if double.port:
        await double.die()


async def refusal(url: str, folder: Path, wanted: Expected = USUAL) -> str:
    """Its words; nothing is left of it."""
    fatal: list[str] = []
    server = server_at(url, folder, fatal, wanted)
    await server.open()
    try:
        with pytest.raises(KvfleetError) as caught:
            await asyncio.wait_for(server.find(), 20)
    finally:
        await server.close()
    assert fatal == []
    assert list(folder.iterdir()) == []  # its sockets
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 900
    assert url in text or isinstance(caught.value, Unavailable)
    return text


SPOILT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no connector": ({"has_connector": False}, ("--kv-transfer-config", "KvfleetConnector", "runtime_dir")),
    "connector's version": ({"wire_version": VERSION + 1}, (f"of version {VERSION + 1}, this worker of {VERSION}",)),
    "no routes": ({"has_routes": False}, ("started without: --enable-scale-out",)),
    "no routes before 0.32": (
        {"answers": {"/inference/v1/generate": (404, b'{"detail": "Not Found"}')}},
        ("started without: --enable-scale-out",),
    ),
    "no sampler": ({"has_sampler": False}, ("started without: --logits-processors kvfleet_vllm.sampler:Sampler",)),
    "no flag at all": ({"has_sampler": False, "other_facts": NO_FLAG}, FLAGS),
    "an unknown model": ({"other_facts": {"vocab_size": None, "dtype": None}}, ("does not tell vocab_size, dtype",)),
    "nonsense": ({"other_facts": {"vocab_size": "many"}}, ("tells nonsense", "many")),
    "data parallel": ({"other_facts": {"data_parallel_size": 2}}, ("2 data-parallel ranks", "one worker, for each")),
    "serves nothing": ({"answers": {"/v1/models": (200, b'{"data": []}')}}, ("serves no model",)),
    "other events": ({"events_go_to": "tcp://127.0.0.1:1"}, ("KV events", "do not arrive", "another server's")),
    "failing": ({"answers": {"/inference/v1/generate": (400, b'{"error": {"message": "no"}}')}}, ("refuses it: no",)),
}
for name, fact in (
    ("policy", "scheduling_policy"),
    ("caching", "enable_prefix_caching"),
    ("async", "async_scheduling"),
):
    SPOILT[f"no {name}"] = ({"other_facts": {fact: NO_FLAG[fact]}}, ("started without: --",))
for place, bodies in {
    "/version": (b"", b"<html>", b"[]", b"5", b"{}", b"\xff\xfe"),
    "/v1/models": (b"nonsense", b"{}", b'{"data": 5}', b'{"data": ["x"]}', b'{"data": [{}]}'),
}.items():
    for body in bodies:
        SPOILT[f"{place} answers {body!r}"] = ({"answers": {place: (200, body)}}, ("is no vLLM",))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for what will not come."""
    monkeypatch.setattr(vllm_server, "HELLO_S", 0.2)
    monkeypatch.setattr(vllm_server, "EVENTS_S", (0.1, 0.2))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("case", SPOILT)
async def test_a_server_that_will_not_do_is_refused_in_one_line(double: VllmDouble, tmp_path: Path, case: str) -> None:
    spoilt, words = SPOILT[case]
    for name, value in spoilt.items():
        setattr(double.made, name, value)
    await double.start()
    text = await refusal(double.url, tmp_path)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("fact", ["max_logprobs", "logits_processors"])
async def test_one_flag_that_is_missing_is_named_alone(double: VllmDouble, tmp_path: Path, fact: str) -> None:
    double.made.other_facts = {fact: NO_FLAG[fact]}
    await double.start()
    text = await refusal(double.url, tmp_path)
    assert sum(flag in text for flag in FLAGS) == 1, text


async def test_what_log_probabilities_need_is_compiled_before_it_counts_as_there(
    double: VllmDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step that has any: requests would find that the worker hangs."""
    scored: list[bool] = []
    made_of = double_server.request_of

    def request_of(body: dict[str, Any], *more: Any) -> Any:
        scored.append("logprobs" in body["sampling_params"])
        return made_of(body, *more)

    monkeypatch.setattr(double_server, "request_of", request_of)
    await double.start()
    server = server_at(double.url, tmp_path, [])
    await server.open()
    await server.find()
    await server.close()
    assert any(scored)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Expected(16, "other", "auto"), "served_model_name: vLLM serves 'demo', not 'other'"),
        (Expected(16, None, "bfloat16"), "dtype: vLLM computes in float32, not bfloat16"),
        (Expected(24, None, "auto"), "block_size: vLLM's blocks of 32 tokens are not made of 24"),
    ],
)
async def test_settings_that_say_otherwise(double: VllmDouble, tmp_path: Path, wanted: Expected, words: str) -> None:
    await double.start()
    assert words in await refusal(double.url, tmp_path, wanted)


async def test_all_that_settings_say_otherwise_is_told_at_once(double: VllmDouble, tmp_path: Path) -> None:
    await double.start()
    text = await refusal(double.url, tmp_path, Expected(24, "other", "bfloat16"))
    assert all(word in text for word in ("block_size", "served_model_name", "dtype"))


@pytest.mark.parametrize("tier", [True, False])
async def test_where_tiers_move_blocks_one_greets_for_all_ranks(
    double: VllmDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: bool
) -> None:
    """And vLLM's host memory is emptied by orders that name nothing on the device."""
    double.made.other_facts = {"tier": tier, "tensor_parallel_size": 2}
    await double.start()
    server = server_at(double.url, tmp_path, [])
    await server.open()
    _, writer = await asyncio.open_unix_connection(server.sockets.news)
    try:
        writer.write(encode([WorkerHello(VERSION, 0, 1, b"f" * 16, 256)]))
        facts = await asyncio.wait_for(server.find(), 20)
        assert (facts.moved is not None) == tier
        answered, erase = [], server.news.erase

        async def erased(hashes: Sequence[ForeignHash]) -> int:
            answered.append(await erase(hashes))
            return answered[-1]

        monkeypatch.setattr(server.news, "erase", erased)
        await server.erase([])
        assert answered == [0] * tier
    finally:
        writer.close()
        await server.close()


async def test_another_http_server(tmp_path: Path) -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    text = await refusal(f"http://127.0.0.1:{runner.addresses[0][1]}", tmp_path)
    assert "is no vLLM" in text
    await runner.cleanup()


@pytest.mark.parametrize("says", [b"220 mail ready\r\n", bytes(range(256)) * 4, b"HTTP/1.1 999 \r\n\r\n"])
async def test_a_server_of_another_protocol(tmp_path: Path, says: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    text = await refusal(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", tmp_path)
    assert "no HTTP" in text or "is no vLLM" in text
    server.close()
    await server.wait_closed()


async def test_the_place_of_the_events_is_taken(double: VllmDouble, tmp_path: Path) -> None:
    """By another worker of this host, most likely."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", int(double.made.events.rsplit(":", 1)[1])))
        await double.start()
        text = await refusal(double.url, tmp_path)
    assert double.made.events in text
    assert "in use" in text


@pytest.mark.usefixtures("hasty")
async def test_events_of_another_server_alone(double: VllmDouble, tmp_path: Path) -> None:
    """They begin a replay, which is this server's own."""
    double.made.events_go_to = "tcp://127.0.0.1:1"
    await double.start()
    other = EventPublisher(double.made.events, f"tcp://127.0.0.1:{free_port()}", double.made.topic)

    async def say() -> None:
        while True:
            await other.say([{"type": "AllBlocksCleared"}])
            await asyncio.sleep(0.01)

    saying = asyncio.create_task(say())
    try:
        assert "do not arrive" in await refusal(double.url, tmp_path)
    finally:
        await end([saying])
        await other.close()


async def test_a_release_that_was_never_tried_is_served_with_a_warning(
    double: VllmDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double.made.version = "0.99.1"
    await double.start()
    server = server_at(double.url, tmp_path, [])
    await server.open()
    facts = await server.find()
    assert facts.version == "0.99.1"
    assert [one.message for one in caplog.records if one.levelno == logging.WARNING] == [
        "vLLM 0.99.1 was never tried with this version of kvfleet"
    ]
    await server.close()


async def found(server: VllmServer, double: VllmDouble) -> None:
    async with asyncio.timeout(20):
        facts = await server.find()
    assert (facts.name, facts.context_length, facts.block_size, facts.slots) == ("demo", 1024, 32, 8)
    await server.close()


async def test_it_waits_where_nothing_listens_and_says_so_once(
    double: VllmDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvfleet.worker.vllm")
    port = free_port()
    server = server_at(f"http://127.0.0.1:{port}", tmp_path, [])
    await server.open()
    finding = asyncio.create_task(found(server, double))
    await asyncio.sleep(0.1)
    told = [one.message for one in caplog.records if "waiting for vLLM" in one.message]
    assert len(told) == 1
    assert f"127.0.0.1:{port}/version does not answer" in told[0]
    double.port = port
    await double.start()
    await finding


async def test_it_waits_where_a_proxy_says_that_there_is_nothing_yet(double: VllmDouble, tmp_path: Path) -> None:
    double.made.answers["/version"] = 503, b"no upstream"
    await double.start()
    server = server_at(double.url, tmp_path, [])
    await server.open()
    finding = asyncio.create_task(found(server, double))
    await asyncio.sleep(0.1)
    assert not finding.done()
    double.made.answers.clear()
    await finding


async def test_one_that_dies_while_it_is_checked_is_waited_for(double: VllmDouble, tmp_path: Path) -> None:
    await double.start()
    double.hang()
    server = server_at(double.url, tmp_path, [])
    await server.open()
    finding = asyncio.create_task(found(server, double))
    await until(lambda: double.engine.scheduler.has_work)
    await double.die()
    await double.start()
    await finding
