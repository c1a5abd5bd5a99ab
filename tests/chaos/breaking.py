"""Loop: carries out a schedule: each fault when its time has come and what its promise assumes is there.

waiting for its turn ──▶ broken (for so many seconds) ──▶ over ──▶ well: everybody is ready again
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import Callable, Coroutine
from typing import Any

from tests.chaos.fleet import Fleet
from tests.chaos.history import Happened, History
from tests.chaos.layout import Role
from tests.chaos.schedule import TRAITS, Fault, Kind, Schedule
from tests.support import vllm_server
from tests.support.nats_proxy import EVENTS, FRAMES, Mangling

SETTLE_S = 120.0  # for everybody to be back after a fault
VLLM_SETTLE_S = 300.0  # where a vLLM server may have to start
VLLM_END_S = 60.0  # for the rest of a vLLM server to end when one process of it was killed
CALM_S = 1.0  # between the recovery of one and the fault of another in the same group
BUSY_S = 2.0  # for a worker to have something to do, before it is broken
RECENT = 100  # exchanges among which are all that run
NATS_CALM_S = 3.0  # after an outage, before anything else breaks
FULL_BYTES = 64 * 1024  # to which the files of a full disk cannot grow

Do = Callable[["Breaker", Fault], Coroutine[Any, Any, None]]


class Breaker:
    """Owns what is broken now. `run` returns when all faults are over and everybody is well. Raises AssertionError."""

    def __init__(self, fleet: Fleet, history: History, say: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._history = history
        self._say = say
        self._broken: dict[str, asyncio.Task[None]] = {}  # by target
        self._well_since: dict[str, float] = {}
        self._settle_s = VLLM_SETTLE_S if fleet.layout.has_vllm else SETTLE_S

    async def run(self, schedule: Schedule, began: float) -> None:
        """`began`: the zero of the schedule's times, by the fleet's clock."""
        for fault in schedule.faults:
            await asyncio.sleep(max(0.0, began + fault.at_s - self._fleet.now()))
            alone = TRAITS[fault.kind].alone
            await self._wait_for_its_turn(fault, alone=alone)
            happened = Happened(fault, self._fleet.now())
            self._history.faults.append(happened)
            self._say(str(fault))
            task = asyncio.create_task(self._carry_out(happened), name=f"fault-{fault.number}")
            self._broken[fault.target] = task
            if alone:
                await task
                await asyncio.sleep(NATS_CALM_S)
        await asyncio.gather(*self._broken.values())

    async def _wait_for_its_turn(self, fault: Fault, *, alone: bool) -> None:
        """Until nothing is broken that would make the fault one that nobody promises anything about."""
        fleet = self._fleet
        end = fleet.now() + self._settle_s
        while not self._may_begin(fault, alone=alone):
            for task in self._broken.values():
                if task.done() and task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]
            assert fleet.now() < end, f"{fault} cannot begin: {', '.join(self._unwell())} not ready"
            await asyncio.sleep(0.05)
        end = fleet.now() + BUSY_S
        while not self._is_busy(fault.target) and fleet.now() < end:
            await asyncio.sleep(0.02)

    def _is_busy(self, target: str) -> bool:
        """Whether a stream is on its way at a worker, so that its loss is noticed at all; others always are."""
        if target not in self._fleet.members or self._fleet.layout.place(target).role is not Role.WORKER:
            return True
        recent = self._history.exchanges[-RECENT:]
        running = (one for one in recent if one.done_at is None and len(one.pieces) > 1)
        return any(one.worker_at(self._fleet.now()) == target for one in running)

    def _may_begin(self, fault: Fault, *, alone: bool) -> bool:
        if alone:
            return all(task.done() for task in self._broken.values()) and not self._unwell()
        if (task := self._broken.get(fault.target)) is not None and not task.done():
            return False
        others = {place.name for place in self._fleet.layout.group_of(fault.target)}
        if any(name in self._broken and not self._broken[name].done() for name in others):
            return False
        if any(self._fleet.now() - self._well_since.get(name, -1e9) < CALM_S for name in others):
            return False
        return self._fleet.are_ready(name for name in others if name in self._fleet.members)

    def _unwell(self) -> list[str]:
        return [name for name in self._fleet.members if not self._fleet.is_ready(name)]

    async def _carry_out(self, happened: Happened) -> None:
        fault = happened.fault
        await _DEEDS[fault.kind](self, fault)
        happened.over_at = self._fleet.now()
        names = self._fleet.members if fault.target == "nats" else [fault.target]
        await self._fleet.wait_ready([name for name in names if name in self._fleet.members], self._settle_s)
        happened.well_at = self._well_since[fault.target] = self._fleet.now()

    # ------------------------------------------------------------------ deeds

    async def kill(self, fault: Fault) -> None:
        self._fleet.members[fault.target].kill()
        await self._gone(fault.target)

    async def drain(self, fault: Fault) -> None:
        self._fleet.members[fault.target].drain()
        await self._gone(fault.target)

    async def upgrade(self, fault: Fault) -> None:
        member = self._fleet.members[fault.target]
        member.version = 3 - member.version  # takes effect with its next life
        await self.drain(fault)

    async def _gone(self, name: str) -> None:
        """Until it has ended and was started again."""
        member = self._fleet.members[name]
        starts = member.starts
        while member.starts == starts:
            await asyncio.sleep(0.02)

    async def kill_vllm(self, fault: Fault) -> None:
        """One process of it, or, as a machine that fails, all of it with its sidecar."""
        server = self._fleet.vllm[fault.target]
        starts = server.starts
        if fault.kind is Kind.VLLM_HOST_KILL:
            self._fleet.members[fault.target].kill()
            server.kill_all()
            await self._gone(fault.target)
        else:
            server.kill(VICTIMS[fault.kind])
        end = self._fleet.now() + VLLM_END_S
        while server.starts == starts:
            assert self._fleet.now() < end, f"{fault}: vLLM lives on:\n{server.last_words()}"
            await asyncio.sleep(0.02)

    async def stop_vllm(self, fault: Fault) -> None:
        server = self._fleet.vllm[fault.target]
        server.stop()
        await asyncio.sleep(fault.for_s)
        server.wake()

    async def stop(self, fault: Fault) -> None:
        member = self._fleet.members[fault.target]
        member.stop()
        await asyncio.sleep(fault.for_s)
        member.wake()

    async def partition(self, fault: Fault) -> None:
        way = self._fleet.ways[fault.target]
        member = self._fleet.members.get(fault.target)
        blocks = member.data_plane if member is not None else None
        way.partition()
        if blocks is not None:
            blocks.stall.set()
        await asyncio.sleep(fault.for_s)
        way.heal()
        if blocks is not None:
            blocks.stall.clear()

    async def cut(self, fault: Fault) -> None:
        self._fleet.ways[fault.target].cut()
        member = self._fleet.members.get(fault.target)
        if member is not None and member.data_plane is not None:
            member.data_plane.cut()

    async def jump(self, fault: Fault) -> None:
        chance = random.Random(fault.seed)
        member = self._fleet.members[fault.target]
        member.shift_clock(chance.choice((-7200.0, -30.0, 5.0, 90.0, 7200.0)))
        await asyncio.sleep(fault.for_s)
        member.shift_clock(0.0)

    async def mangle(self, fault: Fault) -> None:
        way = self._fleet.ways[fault.target]
        way.mangling = MANGLINGS[fault.kind](fault.seed)
        await asyncio.sleep(fault.for_s)
        way.mangling = None

    async def fill_disk(self, fault: Fault) -> None:
        """Its files cannot grow any more, as on a disk without room; takes no root, and the kernel gives it back."""
        pid = self._fleet.members[fault.target].pid
        if pid is None:
            return
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
        await asyncio.sleep(fault.for_s)
        if self._fleet.members[fault.target].pid == pid:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

    async def slow_vault(self, fault: Fault) -> None:
        blocks = self._fleet.members[fault.target].data_plane
        assert blocks is not None
        blocks.bytes_per_s, blocks.latency_s = 200_000.0, 0.02
        await asyncio.sleep(fault.for_s)
        blocks.bytes_per_s, blocks.latency_s = None, 0.0

    async def lie(self, fault: Fault) -> None:
        blocks = self._fleet.members[fault.target].data_plane
        assert blocks is not None
        blocks.flip_every = blocks.flip_every_sent = 20_000
        await asyncio.sleep(fault.for_s)
        blocks.flip_every = blocks.flip_every_sent = 0

    async def nats_kill(self, fault: Fault) -> None:
        await asyncio.to_thread(self._fleet.nats.kill)
        await asyncio.sleep(fault.for_s)
        await asyncio.to_thread(self._fleet.nats.start)

    async def nats_stop(self, fault: Fault) -> None:
        self._fleet.nats.hang()
        await asyncio.sleep(fault.for_s)
        self._fleet.nats.wake()

    async def nats_restart(self, fault: Fault) -> None:
        await asyncio.to_thread(self._fleet.nats.stop)
        await asyncio.sleep(fault.for_s)
        await asyncio.to_thread(self._fleet.nats.start)


VICTIMS = {
    Kind.VLLM_ENGINE_KILL: vllm_server.ENGINE,
    Kind.VLLM_SERVER_KILL: vllm_server.SERVER,
    Kind.VLLM_WORKER_KILL: vllm_server.WORKER,
}

MANGLINGS: dict[Kind, Callable[[int], Mangling]] = {
    Kind.FRAMES_LOST: lambda seed: Mangling(FRAMES, lost=0.15, seed=seed),
    Kind.FRAMES_DUPLICATED: lambda seed: Mangling(FRAMES, duplicated=0.5, seed=seed),
    Kind.FRAMES_REORDERED: lambda seed: Mangling(FRAMES, reordered=0.3, seed=seed),
    Kind.FRAMES_STALE: lambda seed: Mangling(FRAMES, stale=0.5, seed=seed),
    Kind.EVENTS_MANGLED: lambda seed: Mangling(EVENTS, lost=0.3, duplicated=0.2, reordered=0.2, stale=0.2, seed=seed),
}

_DEEDS: dict[Kind, Do] = {
    Kind.KILL: Breaker.kill,
    Kind.STOP_SHORT: Breaker.stop,
    Kind.STOP_LONG: Breaker.stop,
    Kind.DRAIN: Breaker.drain,
    Kind.UPGRADE: Breaker.upgrade,
    Kind.PARTITION: Breaker.partition,
    Kind.CUT: Breaker.cut,
    Kind.CLOCK: Breaker.jump,
    Kind.FRAMES_LOST: Breaker.mangle,
    Kind.FRAMES_DUPLICATED: Breaker.mangle,
    Kind.FRAMES_REORDERED: Breaker.mangle,
    Kind.FRAMES_STALE: Breaker.mangle,
    Kind.EVENTS_MANGLED: Breaker.mangle,
    Kind.DISK_FULL: Breaker.fill_disk,
    Kind.VAULT_SLOW: Breaker.slow_vault,
    Kind.VAULT_LYING: Breaker.lie,
    Kind.NATS_KILL: Breaker.nats_kill,
    Kind.NATS_STOP: Breaker.nats_stop,
    Kind.NATS_DRAIN: Breaker.nats_restart,
    Kind.VLLM_ENGINE_KILL: Breaker.kill_vllm,
    Kind.VLLM_SERVER_KILL: Breaker.kill_vllm,
    Kind.VLLM_WORKER_KILL: Breaker.kill_vllm,
    Kind.VLLM_HOST_KILL: Breaker.kill_vllm,
    Kind.VLLM_STOP: Breaker.stop_vllm,
    Kind.VLLM_HANG: Breaker.stop_vllm,
}

assert set(_DEEDS) == set(TRAITS), "every kind has a deed"
