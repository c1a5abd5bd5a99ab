"""Random schedules as in test_random_schedules, with tiers below the device: tiny ones, with every fault there is.

Running sequences are protected as fast as copies go. Every token is still what a fresh computation gives, every book
balances after every step, and in the end nobody holds anything on device or host.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from memory_remote import Faults, MemoryRemote, Unaddressed
from test_random_schedules import MOST_STEPS, Schedule

from kvfleet.worker.blocks.chain_location import ChainLocation, names_of
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.port.outputs import StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.tiers import protection
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.block_hash import chain
from kvproto.messages import Tier
from tests.support.waiting import LIMIT_S

SCHEDULES = 480


class TieredSchedule(Schedule):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        chance, engine = self.chance, self.engine
        memory, size = engine.runner.memory, engine.pool.block_size
        faulty = chance.random() < 0.5
        faults = Faults(0.1, 0.05, 0.1, 0.1, 0.3) if faulty else Faults()
        self.remote = MemoryRemote(memory.block_bytes, seed, faults) if chance.random() < 0.7 else None
        blocks = chance.randint(1, 30)
        blocks = blocks if chance.random() < 0.9 else 0
        host = HostTier(memoryview(bytearray(memory.block_bytes * blocks)), memory.block_bytes, size)
        tiers = Tiers(engine.pool, Unaddressed(memory) if seed % 3 == 0 else memory, host, self.remote)
        tiers.reuse.is_worth = lambda root, offload_s, recompute_s: True  # type: ignore[method-assign]
        self.engine = Engine(
            engine.runner, engine.pool, engine.scheduler, engine.sequences.detokenizer, clock=self.clock, tiers=tiers
        )
        self.tiers = tiers
        self.below: dict[bytes, bytes] = {}
        add = self.engine.add
        self.engine.add = lambda asked: add(self.prospected(asked))  # type: ignore[method-assign]

    def prospected(self, asked: SequenceSpec) -> SequenceSpec:
        asked = replace(asked, exact=hash(asked.request) % 3 == 0)
        if self.remote is None:
            return asked
        size = self.engine.pool.block_size
        ids = (*asked.prompt_ids, *asked.output_ids)
        names = names_of(asked.root, chain(asked.root, ids, size), ids, size)
        finding = self.remote.look(names, exact=asked.exact, peer="w2", on_ready=lambda: None)
        return replace(asked, location=ChainLocation(names, finding, "w2"))

    def step(self) -> None:
        if (maintained := self.engine.maintain()) is not None:
            self.check_announced(maintained)
        self.engine.check_integrity()
        result = self.engine.step()
        self.transcript.take(result)
        self.engine.check_integrity()
        self.check_announced(result)
        self.obey()
        if self.remote is not None and self.chance.random() < 0.01:
            self.remote.losses += 1
        if not result.sequences:
            time.sleep(0.0005)

    def run(self) -> None:
        to_come = self.chance.randint(2, 12)
        for _ in range(4 * MOST_STEPS):
            self.clock.now += 0.01
            while to_come and (self.chance.random() < 0.4 or not self.busy):
                to_come -= 1
                self.arrive(f"r{to_come}")
            if self.specs and self.chance.random() < 0.1:
                self.meddle()
            if not self.busy and not to_come:
                for request in self.paused:
                    self.engine.resume(request, self.attempt_of(request))
                if not self.busy:
                    return
            self.step()
        raise AssertionError("never ends")

    @property
    def busy(self) -> bool:
        return bool(self.engine.has_work or self.tiers.restorer.waiting)

    def check_announced(self, result: StepResult) -> None:
        super().check_announced(result)
        self.follow(result, Tier.HOST, self.below)
        assert set(self.tiers.host.pool.index.hashes()) == set(self.below)

    def check(self) -> None:
        end = time.monotonic() + LIMIT_S
        while self.tiers.offloader.has_work or self.tiers.offloader._holds:
            if (maintained := self.engine.maintain()) is not None:
                self.check_announced(maintained)
            assert time.monotonic() < end, "an offload never ends"
            time.sleep(0.0005)
        super().check()
        assert self.tiers.host.pool.used == 0

    def close(self) -> None:
        self.tiers.close()
        if self.remote is not None:
            self.remote.close()


@pytest.mark.parametrize("part", range(4))
def test_random_schedules(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, value in (("PERIOD_S", 0.0), ("PROTECT_S", 0.0), ("DOUBT_S", 0.0), ("SHARE", 1e6)):
        monkeypatch.setattr(protection, limit, value)
    restored = protected = 0
    for seed in range(part, SCHEDULES, 4):
        schedule = TieredSchedule(seed)
        try:
            schedule.run()
            schedule.check()
            restored += sum(schedule.tiers.restorer.tokens_total.values())
            protected += schedule.tiers.protector.protected_total if schedule.tiers.protector is not None else 0
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        finally:
            schedule.close()
    assert min(restored, protected) > 50  # else this tests nothing
