"""Running sequences' blocks go to vaults while they run: those that a crash would cost, and no more than a share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from engine_rig import Clock, expected_tokens, relaxed, spec
from hypothesis import given
from hypothesis import strategies as st
from memory_remote import MemoryRemote
from tier_rig import SIZE, TieredRig

from kvfleet.worker.blocks.chain_location import BlockName
from kvfleet.worker.model.fake import FakePace
from kvfleet.worker.tiers import protection
from kvfleet.worker.tiers.link_speed import LinkSpeed
from kvfleet.worker.tiers.protection import PERIOD_S, PROTECT_S, SAVED_UP_S, SHARE, Exposed, choose
from kvproto.messages import Sampling, Tier
from tests.support.waiting import LIMIT_S

RATE = 500.0  # prompt tokens a second, simulated: 125 of them are worth PROTECT_S
LONG = [at * 7 % 991 for at in range(200)]


class GatedRemote(MemoryRemote):
    """A vault that takes what it is given when it is let."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self.gate = threading.Event()
        self.gate.set()
        self.given = 0
        self.there = True

    def offload(self, name: BlockName, payload: memoryview, *, lossy: bool, on_done: Callable[[], None]) -> bool:
        self.given += 1

        def done() -> None:
            assert self.gate.wait(2 * LIMIT_S)
            on_done()

        return super().offload(name, payload, lossy=lossy, on_done=done)

    def speed(self, tier: Tier) -> LinkSpeed | None:
        return super().speed(tier) if self.there else None

    @property
    def tokens(self) -> int:
        return SIZE * len(self.kept[Tier.VAULT])


class Rig(TieredRig):
    """Nobody asks for anything again: nothing goes down but for protection. Its clock is that of the simulation."""

    remote: GatedRemote

    def __init__(self, rate: float = RATE, **shape: object) -> None:
        super().__init__(**{"blocks": 200, "host": 400, "remote": True, "choosy": True, **shape})  # type: ignore[arg-type]
        assert self.tiers.remote is not None
        self.remote.close()
        self.remote = GatedRemote(self.runner.memory.block_bytes)
        self.tiers.remote = self.tiers.restorer.remote = self.remote
        self.tiers.offloader.remote = self.tiers.protector.remote = self.remote  # type: ignore[union-attr]
        self.clock = Clock()
        self.runner.pace = FakePace(prefill_tokens_per_s=rate, clock=self.clock, sleep=self._pass)
        self.engine._clock = self.clock

    def _pass(self, seconds: float) -> None:
        self.clock.now += seconds

    @property
    def lacking(self) -> int:
        """Tokens that the only running sequence has computed and the vault lacks."""
        (sequence,) = self.engine.scheduler.running
        return sequence.computed - self.remote.tokens

    def turns(self, seconds: float, *, step_s: float = 0.0) -> None:
        """So much of the simulation's time, copies being quicker than that."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += step_s
            self.turn()
            self.settle_copies()

    def settle_copies(self) -> None:
        offloader = self.tiers.offloader
        while offloader._batch is not None or offloader._queue or (self.remote.gate.is_set() and offloader._holds):
            self.engine.maintain()
            self.woken.wait(0.001)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.remote.gate.set()
    rig.close()


def test_what_a_crash_would_cost_reaches_the_vault_while_it_runs(rig: Rig) -> None:
    rig.add("long", LONG, 300)
    rig.turns(0.4 + 2 * PERIOD_S, step_s=0.05)
    assert not rig.transcript.ends
    assert rig.lacking < PROTECT_S * RATE
    first = rig.remote.tokens
    assert first >= 200 - SIZE
    lacking = []
    while not rig.transcript.ends:
        lacking.append(rig.lacking)
        rig.turns(0.05, step_s=0.05)
    assert max(lacking) <= PROTECT_S * RATE + SIZE + PERIOD_S / 0.05, "and one period's tokens"
    assert rig.remote.tokens > first, "what is generated counts too"
    assert rig.transcript.tokens["long", 0] == expected_tokens(LONG, Sampling(300, temperature=0.0))
    assert rig.tiers.protector is not None
    assert SIZE * rig.tiers.protector.protected_total == rig.remote.tokens


def test_the_successor_of_a_crashed_worker_restores_it(rig: Rig) -> None:
    rig.add("long", LONG, 300)
    rig.turns(8.0, step_s=0.05)
    outputs = tuple(rig.transcript.tokens["long", 0])
    assert len(outputs) < 300
    lost = rig.lacking
    successor = Rig()
    successor.remote.kept = rig.remote.kept
    known = [*LONG, *outputs]
    successor.add("other", known, 1)  # what it finds of this prompt is what it would find of the attempt
    successor.until(lambda: ("other", 0) in successor.transcript.ends)
    found = successor.cached("other").get("vault", 0)
    assert found >= len(known) - 1 - lost - SIZE
    assert successor.transcript.tokens["other", 0] == expected_tokens(known, Sampling(1, temperature=0.0))
    successor.close()


def test_what_is_quickly_computed_again_is_not_carried(rig: Rig) -> None:
    rig.add("short", LONG[:100], 20)
    rig.turns(5.0, step_s=0.5)
    assert rig.remote.given == 0
    assert rig.host.pool.index.addressed == 0


def test_without_a_vault_or_behind_a_slow_one_nothing_is_carried(rig: Rig) -> None:
    rig.remote.there = False
    rig.add("long", LONG, 300)
    rig.turns(5.0, step_s=0.5)
    assert rig.remote.given == 0
    rig.remote.there = True
    rig.remote.bytes_per_s = rig.runner.memory.block_bytes / (SIZE / RATE)  # fetching takes as long as computing
    rig.turns(5.0, step_s=0.5)
    assert rig.remote.given == 0
    rig.remote.bytes_per_s = 1e9
    rig.turns(2.0, step_s=0.5)
    assert rig.remote.given > 0


def test_no_more_than_a_share_of_the_time() -> None:
    rig = Rig(rate=50.0)
    rig.remote.bytes_per_s = rig.runner.memory.block_bytes / 0.04  # 0.08 s to compute a block, 0.04 to carry it
    began = rig.clock.now
    for name in range(2):
        rig.add(f"long{name}", [name, *LONG], 150)
    rig.turns(40.0, step_s=0.5)
    passed = rig.clock.now - began
    assert SHARE == 0.05
    assert SHARE * passed / 2 <= 0.04 * rig.remote.given <= SHARE * (passed + SAVED_UP_S)
    rig.close()


def test_one_chain_at_a_time_and_no_step_waits_for_it() -> None:
    rig = Rig(host=2000)  # of which far more could wait for the vault
    rig.remote.gate.clear()
    rig.add("long", LONG, 200)
    rig.add("other", [1, *LONG], 200)
    rig.turns(6.0, step_s=0.05)
    assert 0 < rig.remote.given <= 70, "the first one's blocks, and the vault is still at it"
    before = sum(map(len, rig.transcript.tokens.values()))
    rig.turns(3.0, step_s=0.05)
    assert sum(map(len, rig.transcript.tokens.values())) >= before + 50, "a token each step"
    assert rig.remote.given <= 70
    rig.remote.gate.set()
    rig.turns(4.0, step_s=0.05)
    assert rig.remote.given >= 100
    rig.close()


def test_one_that_gave_its_blocks_to_others_is_protected_while_it_waits() -> None:
    rig = Rig(blocks=120)
    rig.remote.there = False
    rig.add("low", LONG, 100)
    rig.turns(1.0, step_s=0.05)
    rig.add("high", [5] * 400, 60, priority=1)
    rig.turns(1.0, step_s=0.05)
    low = next(s for s in rig.engine.sequences if s.spec.request == "low")
    assert low.blocks == [], "it was pushed out"
    rig.remote.there = True
    rig.turns(2.5, step_s=0.05)
    assert low.blocks == []
    assert set(low.hashes[:50]) <= set(rig.remote.kept[Tier.VAULT])
    rig.close()


def test_what_a_vault_lost_is_carried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protection, "DOUBT_S", 2.0)
    rig.add("long", LONG, 300)
    rig.turns(3.0, step_s=0.05)
    assert rig.remote.tokens >= 200
    rig.remote.kept[Tier.VAULT].clear()
    rig.turns(3.0, step_s=0.05)
    assert rig.remote.tokens < 200, "nobody said so"
    rig.remote.losses += 1
    rig.turns(3.0, step_s=0.05)
    assert rig.lacking < PROTECT_S * RATE


def test_what_nobody_may_see_is_not_carried(rig: Rig) -> None:
    rig.engine.add(spec("own", LONG, 300, exact=True))
    rig.turn()
    (sequence,) = rig.engine.scheduler.running
    sequence.private = True
    rig.turns(5.0, step_s=0.5)
    assert rig.remote.given == 0


def chain_of(end: int, on_host: int, vaulted: int) -> Exposed:
    sequence: Any = SimpleNamespace()
    return Exposed(sequence, end, min(on_host, end), min(vaulted, end))


chains = st.lists(st.builds(chain_of, *[st.integers(0, 300)] * 3), max_size=6)
seconds = st.floats(1e-6, 1.0)


@relaxed
@given(chains, st.floats(0, 2.0), seconds, seconds, seconds)
def test_a_choice_is_worth_it_and_within_what_there_is(
    found: list[Exposed], budget_s: float, compute_s: float, copy_s: float, carry_s: float
) -> None:
    chosen = choose(found, budget_s, compute_s=compute_s, copy_s=copy_s, carry_s=carry_s)
    if chosen is None:
        return
    worst, end, took_s = chosen
    assert worst.vaulted < end <= worst.end
    assert (worst.end - worst.vaulted) * compute_s > PROTECT_S
    assert all(one.end - one.vaulted <= worst.end - worst.vaulted for one in found)
    assert carry_s < compute_s
    copied = end - min(worst.on_host, worst.vaulted)
    assert copied * copy_s + (end - worst.vaulted) * carry_s <= took_s + 1e-9
    assert took_s <= budget_s + 1e-9
