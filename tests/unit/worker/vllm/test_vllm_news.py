"""What runs inside vLLM tells the worker, over real sockets: in parts, as nonsense, and after it was replaced."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import get_args

import msgpack
import pytest

from kvfleet.worker.vllm import vllm_news
from kvfleet.worker.vllm.vllm_news import DrawFailures, Told, VllmNews, problem_of
from kvfleet_vllm.wire import (
    ERASE_HASHES,
    VERSION,
    BlocksErased,
    Decoder,
    EngineHello,
    EngineStep,
    EraseBlocks,
    GrantSlots,
    Message,
    Scheduled,
    WorkerHello,
    encode,
)
from kvproto.errors import EngineFailure, InvalidRequest, Unavailable
from tests.support.waiting import LIMIT_S, until

HELLO = EngineHello(VERSION, "one", 1, "0.32.0", {"model": "m"})
WORKER = WorkerHello(VERSION, 0, 1, b"f" * 16, 64)
STEP = EngineStep(0.5, 2, 30, 28, ("a",))


class Connector:
    """vLLM's end of the connection."""

    @classmethod
    async def connect(cls, path: Path) -> Connector:
        one = cls()
        one.reader, one.writer = await asyncio.open_unix_connection(path)
        one.decoder = Decoder()
        return one

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    decoder: Decoder

    def say(self, *messages: Message) -> None:
        self.writer.write(encode(messages))

    async def hears(self, count: int) -> list[Message]:
        found: list[Message] = []
        while len(found) < count:
            found += self.decoder.feed(await self.reader.read(1 << 20))
        return found

    def close(self) -> None:
        self.writer.close()


class Heard:
    def __init__(self) -> None:
        self.told: list[Message] = []
        self.gone: list[str] = []
        self.workers: list[bool] = []  # whether it came or was lost

    def come(self) -> None:
        self.workers.append(True)

    def lose(self) -> None:
        self.workers.append(False)


@pytest.fixture
async def heard(tmp_path: Path) -> AsyncIterator[tuple[VllmNews, Heard]]:
    heard = Heard()
    news = VllmNews(tmp_path / "n", heard.told.append, heard.told.append, heard.gone.append, heard.come, heard.lose)
    await news.listen()
    yield news, heard
    await news.close()
    await asyncio.sleep(0)


async def test_messages_in_any_parts_in_order(heard: tuple[VllmNews, Heard]) -> None:
    news, listener = heard
    connector = await Connector.connect(news.path)
    for byte in encode([HELLO, STEP, Scheduled("a", 16, 0)]):
        connector.writer.write(bytes([byte]))
        await connector.writer.drain()
    await until(lambda: len(listener.told) == 3, pause_s=0.001)
    assert listener.told == [HELLO, STEP, Scheduled("a", 16, 0)]
    connector.close()
    await until(lambda: listener.gone, pause_s=0.001)
    assert listener.gone == ["its connector hung up"]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"\0\0\0\1\xc1", encode([HELLO])[:9]])
async def test_who_does_not_greet_is_nobody(heard: tuple[VllmNews, Heard], data: bytes) -> None:
    news, listener = heard
    stranger = await Connector.connect(news.path)
    stranger.say(STEP)
    stranger.writer.write(data)
    with contextlib.suppress(OSError):
        stranger.writer.write_eof()
        assert await stranger.reader.read() == b""
    stranger.close()
    assert listener.told == listener.gone == []


async def test_nonsense_after_a_greeting_is_its_end(heard: tuple[VllmNews, Heard]) -> None:
    news, listener = heard
    connector = await Connector.connect(news.path)
    connector.say(HELLO)
    await until(lambda: listener.told, pause_s=0.001)
    connector.writer.write(b"\xff" * 8)
    await until(lambda: listener.gone, pause_s=0.001)
    assert listener.gone[0].startswith("its connector cannot be read")
    connector.close()


async def test_a_new_one_replaces_the_last_without_a_word(heard: tuple[VllmNews, Heard]) -> None:
    news, listener = heard
    first, second = await Connector.connect(news.path), await Connector.connect(news.path)
    first.say(HELLO)
    await until(lambda: listener.told == [HELLO], pause_s=0.001)
    second.say(HELLO, STEP)
    await until(lambda: len(listener.told) == 3, pause_s=0.001)
    assert await first.reader.read() == b"", "it is hung up on"
    assert listener.gone == []
    for one in (first, second):
        one.close()


async def test_with_a_worker_the_scheduler_is_hung_up_on_too(
    heard: tuple[VllmNews, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not come back otherwise."""
    monkeypatch.setattr(vllm_news, "LOST_S", 0.05)
    news, listener = heard
    scheduler, worker, again = [await Connector.connect(news.path) for _ in range(3)]
    scheduler.say(HELLO)
    worker.say(WORKER)
    await until(lambda: news.workers, pause_s=0.001)
    worker.close()
    again.say(WORKER)  # at once, as when the scheduler's connection is another one
    await asyncio.sleep(0.2)
    assert news.grant([1])
    assert listener.workers == [True, True]
    again.close()
    assert await scheduler.hears(1) == [GrantSlots((1,))]
    assert await scheduler.reader.read() == b""
    assert listener.workers == [True, True, False]
    assert listener.gone == []
    assert not news.grant([2])
    scheduler.close()


async def test_a_vllm_that_ends_is_gone_not_lost(
    heard: tuple[VllmNews, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_news, "LOST_S", 0.05)
    news, listener = heard
    scheduler, worker = [await Connector.connect(news.path) for _ in range(2)]
    scheduler.say(HELLO)
    worker.say(WORKER)
    await until(lambda: news.workers, pause_s=0.001)
    worker.close()
    scheduler.close()
    await asyncio.sleep(0.2)
    assert listener.gone == ["its connector hung up"]
    assert listener.workers == [True]


async def test_many_blocks_are_erased_in_parts_that_fit(heard: tuple[VllmNews, Heard]) -> None:
    news, _ = heard
    connector = await Connector.connect(news.path)
    connector.say(HELLO)
    await until(lambda: news._writer, pause_s=0.001)
    erasing = asyncio.create_task(news.erase([*range(2 * ERASE_HASHES + 1)]))
    orders = await connector.hears(3)
    assert all(isinstance(order, EraseBlocks) for order in orders)
    assert [len(order.hashes) for order in orders] == [ERASE_HASHES, ERASE_HASHES, 1]  # type: ignore[union-attr]
    connector.say(*(BlocksErased(order.number, 5) for order in reversed(orders)), BlocksErased(99, 1))  # type: ignore[union-attr]
    assert await asyncio.wait_for(erasing, 5) == 15
    connector.close()


async def test_an_erase_that_is_not_answered_fails(
    heard: tuple[VllmNews, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    news, _ = heard
    with pytest.raises(EngineFailure, match="away"):
        await news.erase([1])
    connector = await Connector.connect(news.path)
    connector.say(HELLO)
    await until(lambda: news._writer, pause_s=0.001)
    erasing = asyncio.create_task(news.erase([*range(ERASE_HASHES + 1)]))
    await connector.hears(2)
    connector.close()
    with pytest.raises(EngineFailure, match="gone"):
        await asyncio.wait_for(erasing, 5)
    monkeypatch.setattr(vllm_news, "ERASE_S", 0.01)
    connector = await Connector.connect(news.path)
    connector.say(HELLO)
    await until(lambda: news._writer, pause_s=0.001)
    with pytest.raises(EngineFailure, match="does not answer"):
        await news.erase([1])
    connector.close()


async def test_its_end_is_that_of_every_connection(heard: tuple[VllmNews, Heard]) -> None:
    news, listener = heard
    connector, worker = await Connector.connect(news.path), await Connector.connect(news.path)
    connector.say(HELLO)
    worker.say(WORKER)
    await until(lambda: listener.told and listener.workers, pause_s=0.001)
    await news.close()
    for one in (connector, worker):
        assert await asyncio.wait_for(one.reader.read(), LIMIT_S) == b""
        one.close()
    assert listener.gone == []


@pytest.mark.parametrize("turns", range(6))
async def test_also_of_one_that_comes_just_then(heard: tuple[VllmNews, Heard], turns: int) -> None:
    """It is accepted in several turns of the event loop."""
    news, _ = heard
    with socket.socket(socket.AF_UNIX) as late:
        late.connect(str(news.path))
        late.settimeout(LIMIT_S)
        for _ in range(turns):
            await asyncio.sleep(0)
        await news.close()
        assert await asyncio.to_thread(late.recv, 1) == b""


async def test_a_path_that_cannot_be_listened_at(tmp_path: Path) -> None:
    nowhere = tmp_path / "none" / "n"
    with pytest.raises(Unavailable, match="cannot listen"):
        await VllmNews(nowhere, print, print, print, print, print).listen()
    with pytest.raises(Unavailable, match="cannot listen"):
        DrawFailures(nowhere)


def test_a_connector_of_another_version_is_a_problem() -> None:
    assert problem_of(HELLO) is None
    assert "install the same kvfleet on both" in (problem_of(EngineHello(VERSION + 1, "", 1, "", {})) or "")


# ---------------------------------------------------------------------- the sampler's


@pytest.fixture
def failures(tmp_path: Path) -> Iterator[DrawFailures]:
    one = DrawFailures(tmp_path / "d")
    yield one
    one.close()
    assert not one.path.exists()


def tell(failures: DrawFailures, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(data, str(failures.path))


def failure(name: str, index: int) -> bytes:
    data: bytes = msgpack.packb([name, 0, index, "invalid_request", "every token is banned"])
    return data


def test_a_token_that_could_not_be_drawn_is_told_once_at_its_index(failures: DrawFailures) -> None:
    assert failures.of("a", 0) is None
    tell(failures, failure("a", 2))
    tell(failures, failure("b", 0))
    assert failures.of("a", 0) is failures.of("a", 1) is failures.of("c", 2) is None
    error = failures.of("a", 2)
    assert isinstance(error, InvalidRequest)
    assert "banned" in str(error)
    assert failures.of("a", 2) is None
    assert failures.of("b", 0) is not None


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgpack.packb(5), msgpack.packb(["a", 1]), msgpack.packb([[], 0, 0, 0, 0])]
)
def test_what_is_no_failure_is_passed_over(failures: DrawFailures, data: bytes) -> None:
    tell(failures, data)
    tell(failures, failure("a", 0))
    assert failures.of("a", 0) is not None


def test_failures_that_nobody_asks_about_are_few(failures: DrawFailures) -> None:
    for number in range(vllm_news.MAX_FAILURES + 10):
        tell(failures, failure(f"r{number}", 0))
        failures.of("nobody", 0)
    assert len(failures._known) == vllm_news.MAX_FAILURES
    assert failures.of("r0", 0) is None


def test_no_message_of_vllms_is_left_out() -> None:
    answered, ours = {EngineHello, WorkerHello, BlocksErased}, {EraseBlocks, GrantSlots}
    assert set(get_args(Told)) == set(get_args(Message)) - answered - ours
