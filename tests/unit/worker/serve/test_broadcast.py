"""When events and milestones leave: in their time, on one timer, and nothing runs while there is nothing to say."""

from __future__ import annotations

import asyncio

import pytest

from kvfleet.worker.port.outputs import KvPublisher, StepResult
from kvfleet.worker.serve import broadcast
from kvfleet.worker.serve.broadcast import MILESTONE_PERIOD_S, Broadcast
from kvfleet.worker.streams.milestones import PER_MESSAGE, MilestoneLog
from kvproto import codec
from kvproto.messages import BlockRun, KvEvents, Milestone, Milestones, Passed, Tier, TierEvents
from kvproto.subjects import Subjects
from kvservice.event_log import IDLE_PERIOD_S
from tests.support.kv_events import decode_events
from tests.support.waiting import LIMIT_S

S = Subjects()


def stored(block: bytes, sequences: int = 0) -> StepResult:
    event = TierEvents(Tier.DEVICE, False, (BlockRun(b"p" * 16, (block,)),))
    return StepResult(changes=[event], sequences=sequences)


class Rig:
    """Stands for connection and outbox."""

    def __init__(self) -> None:
        self.is_connected = True
        self.milestones: list[Milestones] = []
        self.events: list[KvEvents] = []
        self.publisher = KvPublisher("e1")
        self.log = MilestoneLog("w0", "e1")
        self.broadcast = Broadcast(self, self, S, "w0", self.publisher, self.log)  # type: ignore[arg-type]

    def send(self, subject: str, data: bytes) -> None:
        if subject == S.events("w0"):
            self.events.append(decode_events(data))
        else:
            assert subject == S.milestones("w0")
            self.milestones.append(codec.decode(Milestones, data))

    def accept(self, name: str) -> None:
        self.log.add(Milestone("acme", name, 0, Passed.ACCEPTED))
        self.broadcast.wake()

    @property
    def told(self) -> list[str]:
        return [item.request for message in self.milestones for item in message.items]

    @property
    def sleeps(self) -> bool:
        return self.broadcast._timer is None


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def wait_until_told(rig: Rig, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(rig.told) < count:
            await asyncio.sleep(0.001)


async def test_the_first_leaves_at_once_with_all_that_is_said_in_the_same_turn(rig: Rig) -> None:
    rig.accept("r0")
    rig.accept("r1")
    assert rig.milestones == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [len(message.items) for message in rig.milestones] == [2]
    assert rig.sleeps


async def test_no_more_than_one_message_in_20_ms(rig: Rig) -> None:
    clock = asyncio.get_running_loop().time
    began, said = clock(), 0
    while clock() < began + 0.3:
        rig.accept(f"r{said}")
        said += 1
        await asyncio.sleep(0.001)
    await wait_until_told(rig, said)
    assert len(rig.milestones) <= (clock() - began) / MILESTONE_PERIOD_S + 1
    assert rig.told == [f"r{at}" for at in range(said)]
    assert rig.sleeps


async def test_many_are_split(rig: Rig) -> None:
    for at in range(PER_MESSAGE + 1):
        rig.accept(f"r{at}")
    await wait_until_told(rig, PER_MESSAGE + 1)
    assert [len(message.items) for message in rig.milestones] == [PER_MESSAGE, 1]
    assert rig.sleeps


async def test_milestones_wait_for_nats_and_no_timer_runs_meanwhile(rig: Rig) -> None:
    rig.is_connected = False
    rig.accept("r0")
    assert rig.sleeps
    rig.is_connected = True
    rig.accept("r1")
    rig.is_connected = False  # before its turn
    await asyncio.sleep(0.03)
    assert rig.milestones == []
    assert rig.sleeps
    rig.is_connected = True
    rig.broadcast.wake()  # the heartbeat's beat
    await wait_until_told(rig, 2)
    assert rig.told == ["r0", "r1"]


async def test_flush_leaves_nothing_and_no_timer(rig: Rig) -> None:
    for turn in range(2):
        rig.broadcast.changes([stored(bytes([turn]) * 16)])
        for at in range(PER_MESSAGE + 1):
            rig.log.add(Milestone("acme", f"r{at}", turn, Passed.ACCEPTED))
        rig.broadcast.wake()
    assert not rig.sleeps
    rig.broadcast.flush()
    assert rig.sleeps
    assert len(rig.told) == 2 * (PER_MESSAGE + 1)
    assert [event.seq for event in rig.events] == [1, 2]


async def test_idle_changes_leave_on_the_timer_beside_milestones(rig: Rig) -> None:
    clock = asyncio.get_running_loop().time
    began, at = clock(), 0
    while clock() < began + 0.2:
        rig.broadcast.changes([stored(at.to_bytes(16, "big"))])
        rig.accept(f"r{at}")
        at += 1
        await asyncio.sleep(0.002)
    async with asyncio.timeout(LIMIT_S):
        while not rig.sleeps:
            await asyncio.sleep(0.001)
    told = [one for event in rig.events for change in event.changes for run in change.runs for one in run.hashes]
    assert told == [one.to_bytes(16, "big") for one in range(at)]
    assert [event.seq for event in rig.events] == list(range(1, len(rig.events) + 1))
    assert 1 < len(rig.events) <= (clock() - began) / IDLE_PERIOD_S + 1
    assert len(rig.told) == at


async def test_a_step_that_ran_is_told_at_once(rig: Rig) -> None:
    for at in range(5):
        rig.broadcast.changes([stored(bytes([at]) * 16, sequences=1)])
        assert len(rig.events) == at + 1


async def test_a_snapshot_is_of_an_event_even_if_changes_were_held_back(rig: Rig) -> None:
    """The answer comes between two deliveries, and another one before whoever asked gets his turn."""
    digest = 0

    def change(block: bytes) -> None:
        nonlocal digest
        digest ^= int.from_bytes(block[:8], "little")
        rig.broadcast.changes([stored(block)])

    class Engine:
        """Its thread between two steps."""

        async def holdings(self) -> tuple[object, int]:
            change(b"c" * 16)
            answer = {}, digest
            change(b"d" * 16)
            return answer

    change(b"a" * 16)
    change(b"b" * 16)
    assert len(rig.events) == 1
    (part,) = await rig.broadcast.snapshot(Engine(), None)  # type: ignore[arg-type]
    assert [event.seq for event in rig.events] == [1, 2, 3, 4]
    assert part.seq == 3
    change(b"e" * 16)
    assert len(rig.events) == 4, "from here on they wait again"
    rig.broadcast.flush()


async def test_after_an_outage_the_last_ones_are_said_again_at_once_and_when_all_are_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "ALL_BACK_S", 0.05)
    rig.accept("r0")
    await wait_until_told(rig, 1)
    rig.is_connected = False
    rig.broadcast.away()
    rig.accept("r1")
    rig.is_connected = True
    await rig.broadcast.back()
    await wait_until_told(rig, 3)
    assert rig.told == ["r0", "r0", "r1"]
    await wait_until_told(rig, 5)
    assert rig.told[3:] == ["r0", "r1"]
    assert [message.first for message in rig.milestones] == [0, 0, 0]
    rig.accept("r2")
    await wait_until_told(rig, 6)
    assert rig.milestones[-1].first == 2
    assert rig.sleeps
