"""The feed against a publisher that does as vLLM's: numbers from 0, a replay socket, silent drops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvfleet.worker.vllm.kv_event_feed import Event, KvEventFeed
from tests.support.vllm_double.event_publisher import EventPublisher


class Heard:
    """What the feed has told, `None` where all is cleared."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_events(self, events: Sequence[Event]) -> None:
        self.events += [event["n"] for event in events]

    async def until(self, expected: list[Any]) -> None:
        async with asyncio.timeout(10):
            while self.events[-len(expected) :] != expected:
                await asyncio.sleep(0.01)


@pytest.fixture(params=[True, False], ids=["the feed binds", "vLLM binds"])
def binds(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"


@pytest.fixture
async def feed(places: tuple[str, str], binds: bool) -> AsyncIterator[tuple[KvEventFeed, Heard]]:
    heard = Heard()
    feed = KvEventFeed(*places, "kv", binds, heard.on_events, lambda: heard.events.append(None))
    feed.open()
    task = asyncio.create_task(feed.run())
    yield feed, heard
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def begin(places: tuple[str, str], binds: bool, heard: Heard, **more: Any) -> EventPublisher:
    """A publisher that is heard: what it says before its subscriber is there is lost, as for vLLM."""
    publisher = EventPublisher(*places, binds=not binds, **more)
    await publisher.say([{"n": "begin"}])
    async with asyncio.timeout(10):
        while heard.events[-1:] != ["begin"]:
            await publisher.say_first_again()
            await asyncio.sleep(0.05)
    heard.events.clear()
    return publisher


async def test_all_in_order(feed: tuple[KvEventFeed, Heard], places: tuple[str, str], binds: bool) -> None:
    _, heard = feed
    publisher = await begin(places, binds, heard)
    for number in range(100):
        await publisher.say([{"n": number}, {"n": -number}])
    await heard.until([99, -99])
    assert heard.events == [one for number in range(100) for one in (number, -number)]
    await publisher.close()


async def test_what_was_dropped_is_replayed(
    feed: tuple[KvEventFeed, Heard], places: tuple[str, str], binds: bool
) -> None:
    events, heard = feed
    publisher = await begin(places, binds, heard)
    await publisher.say([{"n": 1}])
    await publisher.say([{"n": 2}], heard=False)
    await publisher.say([{"n": 3}], heard=False)
    await publisher.say([{"n": 4}])
    await publisher.say([{"n": 5}])
    await heard.until([1, 2, 3, 4, 5])
    assert events.replays_total == 1
    await publisher.close()


async def test_what_is_lost_for_good_clears_all(
    feed: tuple[KvEventFeed, Heard], places: tuple[str, str], binds: bool
) -> None:
    _, heard = feed
    publisher = await begin(places, binds, heard, kept=2)
    for number in range(6):
        await publisher.say([{"n": number}], heard=number in (0, 5))
    await heard.until([0, None, 5])
    await publisher.say([{"n": 6}])
    await heard.until([5, 6])
    await publisher.close()


async def test_another_process_begins_anew(
    feed: tuple[KvEventFeed, Heard], places: tuple[str, str], binds: bool
) -> None:
    _, heard = feed
    publisher = await begin(places, binds, heard)
    for number in range(400):  # more than the next one has said when it is heard
        await publisher.say([{"n": number}])
    await heard.until([398, 399])
    await publisher.close()
    publisher = EventPublisher(*places, binds=not binds)
    await publisher.say([{"n": "a"}], heard=False)
    await publisher.say([{"n": "b"}], heard=False)
    async with asyncio.timeout(10):
        while "c" not in heard.events:
            await publisher.say([{"n": "c"}])
            await asyncio.sleep(0.05)
    assert heard.events[400:403] == [None, "a", "b"]
    await publisher.close()


async def test_one_that_is_known_to_have_restarted_is_replayed_from_the_beginning(
    feed: tuple[KvEventFeed, Heard], places: tuple[str, str], binds: bool
) -> None:
    """Its numbers may have passed those of the process before it."""
    events, heard = feed
    publisher = await begin(places, binds, heard)
    await publisher.say([{"n": 1}])
    await heard.until([1])
    await publisher.close()
    publisher = EventPublisher(*places, binds=not binds)
    for number in range(5):
        await publisher.say([{"n": f"new {number}"}], heard=False)
    events.restarted()
    async with asyncio.timeout(10):
        while "last" not in heard.events:
            await publisher.say([{"n": "last"}])
            await asyncio.sleep(0.05)
    assert heard.events[:7] == [1, None, *(f"new {number}" for number in range(5))]
    await publisher.close()


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgpack.packb(5), msgpack.packb([1.0, 7]), msgpack.packb([1, [{}]])])
async def test_nonsense_clears_all_and_what_follows_is_heard(
    feed: tuple[KvEventFeed, Heard], places: tuple[str, str], binds: bool, payload: bytes
) -> None:
    events, heard = feed
    publisher = await begin(places, binds, heard)
    await publisher.say([], payload=payload)
    await publisher.say([{"n": 1}])
    await heard.until([None, 1])
    assert events.malformed_total == 1
    await publisher.close()


async def test_messages_of_others_are_passed_over(
    feed: tuple[KvEventFeed, Heard], places: tuple[str, str], binds: bool
) -> None:
    events, heard = feed
    publisher = await begin(places, binds, heard)
    for frames in ([b"kv"], [b"kv", b"12345678"], [b"kv2", bytes(8), b"x"], [b"kv", b"short", b"x"]):
        await publisher.send_frames(*frames)
    await publisher.say([{"n": 1}])
    await heard.until([1])
    assert events.malformed_total == 4
    await publisher.close()
