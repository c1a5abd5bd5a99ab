"""A sequence that is erased leaves nothing in any tier, whatever of it is on its way just then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from engine_rig import ROOT, Transcript, make_engine, spec
from memory_remote import MemoryRemote
from test_tiered_schedules import TieredSchedule

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.chain_location import BlockName
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.block_hash import ForkedRoot, Root, chain
from kvproto.messages import Sampling, Tier
from tests.support.waiting import LIMIT_S

SIZE = 4
SCHEDULES = 80
PROMPT = tuple(range(1, 33))
FORK = PROMPT[:16] + tuple(range(101, 117))


class GatedRemote(MemoryRemote):
    """A vault that takes nothing until its gate opens."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self.gate = threading.Event()
        self.gate.set()
        self.erased: list[list[bytes]] = []

    def offload(self, name: BlockName, payload: memoryview, *, lossy: bool, on_done: Callable[[], None]) -> bool:
        self._pool.submit(self.gate.wait, 10)
        return super().offload(name, payload, lossy=lossy, on_done=on_done)

    def erase(self, names: Sequence[BlockName]) -> None:
        self.erased.append([name.hash for name in names])
        self._pool.submit(super().erase, names)  # after what waits to be written


class Rig:
    def __init__(self) -> None:
        made = make_engine(block_size=SIZE)
        memory = made.runner.memory
        self.remote = GatedRemote(memory.block_bytes)
        self.host = HostTier(memoryview(bytearray(64 * memory.block_bytes)), memory.block_bytes, SIZE)
        self.tiers = Tiers(made.pool, memory, self.host, self.remote)
        self.tiers.reuse.is_worth = lambda root, offload_s, recompute_s: True  # type: ignore[method-assign]
        self.engine = Engine(made.runner, made.pool, made.scheduler, made.sequences.detokenizer, tiers=self.tiers)
        self.asked = 0

    def run(self, prompt: tuple[int, ...], root: Root = ROOT) -> int:
        """Its prompt's blocks are offered to the tiers below. Returns how many tokens were cached."""
        self.asked += 1
        name = f"r{self.asked}"
        self.engine.add(SequenceSpec(name, 0, prompt, Sampling(1, temperature=0.0), root))
        return Transcript().run(self.engine).started[name, 0].cached_tokens

    def maintain(self, while_: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_S
        while while_():
            self.engine.maintain()
            self.engine.check_integrity()
            assert time.monotonic() < end, "never ends"
            time.sleep(0.0005)

    def settle(self) -> None:
        offloader = self.tiers.offloader
        self.maintain(lambda: offloader.has_work or offloader._holds)
        self.engine.maintain()
        self.remote._pool.submit(lambda: None).result()
        self.remote._pool.submit(lambda: None).result()

    def left(self) -> tuple[int, int, int]:
        """Full blocks on device, host and vault."""
        return self.engine.pool.index.addressed, self.host.pool.index.addressed, len(self.remote.kept[Tier.VAULT])


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.remote.gate.set()
    rig.tiers.close()
    rig.remote.close()


def test_what_lies_still_goes_at_once(rig: Rig) -> None:
    rig.run(PROMPT)
    rig.settle()
    assert rig.left() == (8, 8, 8)
    assert rig.engine.kv.erase(ROOT, PROMPT) == 16
    rig.settle()
    assert rig.left() == (0, 0, 0)
    assert rig.run(PROMPT) == 0


def test_what_waits_to_be_copied_or_is_being_copied(rig: Rig) -> None:
    """At once after the turn; what has begun ends first."""
    for turns in range(4):
        rig.run(PROMPT)
        for _ in range(turns):
            rig.engine.maintain()
        rig.engine.kv.erase(ROOT, PROMPT)
        rig.settle()
        assert rig.left() == (0, 0, 0)


def test_what_a_vault_is_slow_to_take(rig: Rig) -> None:
    rig.remote.gate.clear()
    rig.run(PROMPT)
    offloader = rig.tiers.offloader
    rig.maintain(lambda: not offloader._holds)
    rig.engine.kv.erase(ROOT, PROMPT)
    for _ in range(50):
        rig.engine.maintain()
    assert rig.left()[:2] == (0, 8), "the vault's writer reads these"
    assert len(rig.remote.erased) == 1, "vaults are not told again and again"
    rig.remote.gate.set()
    rig.settle()
    assert rig.left() == (0, 0, 0)


def test_what_a_peer_is_reading(rig: Rig) -> None:
    rig.run(PROMPT)
    rig.settle()
    blocks = rig.engine.pool.chain_to(chain(ROOT, PROMPT, SIZE))
    rig.engine.pool.acquire(blocks)
    held: list[tuple[BlockPool, list[int]]] = [(rig.engine.pool, blocks)]
    rig.tiers.lent[1] = held
    rig.engine.kv.erase(ROOT, PROMPT)
    rig.engine.maintain()
    assert rig.left()[0] == 8
    rig.engine.pool.release(blocks)
    rig.tiers.lent.clear()
    rig.settle()
    assert rig.left() == (0, 0, 0)


def test_what_others_continue_stays_in_every_tier(rig: Rig) -> None:
    for prompt in (PROMPT, FORK):
        rig.run(prompt)
    rig.settle()
    assert rig.left() == (12, 12, 12)
    rig.engine.kv.erase(ROOT, FORK)
    rig.settle()
    assert rig.left()[:2] == (8, 8)
    assert rig.run(PROMPT) == len(PROMPT) - 1
    assert rig.run(FORK) == 16


def test_what_a_running_sequence_holds_stays(rig: Rig) -> None:
    rig.engine.add(spec("running", PROMPT, max_tokens=8))
    rig.engine.step()
    rig.engine.step()
    rig.engine.kv.erase(ROOT, PROMPT)
    rig.engine.check_integrity()
    transcript = Transcript()
    transcript.started["running", 0] = None  # type: ignore[assignment]
    transcript.run(rig.engine)
    assert rig.run(PROMPT) == len(PROMPT) - 1


def test_what_the_last_reader_never_saw_goes_in_every_tier(rig: Rig) -> None:
    rig.engine.add(spec("cut", PROMPT, max_tokens=40))
    transcript = Transcript()
    while len(transcript.tokens["cut", 0]) < 20:
        rig.engine.maintain()
        transcript.take(rig.engine.step())
    seen = PROMPT + tuple(transcript.tokens["cut", 0][:6])
    rig.engine.cancel("cut", 0, (6,))
    rig.engine.step()
    rig.settle()
    assert rig.left() == (9, 9, 9), "32 tokens of the prompt and 4 more: a block that it saw half of went"
    assert rig.engine.kv.erase(ROOT, seen) == 18
    rig.settle()
    assert rig.left() == (0, 0, 0)
    assert not rig.engine.pool.cached


def test_what_a_paused_sequence_computed_past_that_goes_too(rig: Rig) -> None:
    rig.engine.add(spec("cut", PROMPT, max_tokens=40))
    transcript = Transcript()
    while len(transcript.tokens["cut", 0]) < 20:
        transcript.take(rig.engine.step())
    rig.engine.pause("cut", 0)
    rig.settle()
    rig.engine.cancel("cut", 0, (0,))
    rig.settle()
    assert rig.left() == (8, 8, 8)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_sequences_that_share_a_beginning_leave_nothing_in_any_order(rig: Rig, order: tuple[int, ...]) -> None:
    root = ForkedRoot(b"public root 16 b", ROOT, 2)
    chains = (PROMPT, FORK, (*FORK[:26], *range(201, 209)))
    for one in chains:
        rig.run(one, root)
    rig.settle()
    for at in order:
        rig.engine.kv.erase(root, chains[at])
    rig.settle()
    assert rig.left() == (2, 2, 2), "the public blocks"
    assert rig.engine.pool.cached == 2


def test_what_is_to_be_kept_of_a_sequence_stays_in_every_tier(rig: Rig) -> None:
    rig.run(PROMPT)
    rig.settle()
    rig.engine.kv.erase(ROOT, PROMPT, keep=18)
    rig.settle()
    assert rig.left() == (4, 4, 4)


def test_a_public_prefix_stays_in_every_tier(rig: Rig) -> None:
    root = ForkedRoot(b"public root 16 b", ROOT, 3)
    rig.run(PROMPT, root)
    rig.settle()
    rig.engine.kv.erase(root, PROMPT)
    rig.settle()
    assert rig.left() == (3, 3, 3)
    other = ForkedRoot(root.public, b"another root 16b", 3)
    assert rig.run(PROMPT, other) == 12


def test_erasing_what_nobody_has_changes_nothing(rig: Rig) -> None:
    rig.run(PROMPT)
    rig.settle()
    for root, ids in ((b"another root 16b", PROMPT), (ROOT, ()), (ROOT, (7,)), (ROOT, FORK[16:])):
        assert rig.engine.kv.erase(root, ids) == 0
    rig.settle()
    assert rig.left()[:2] == (8, 8)


def test_what_a_running_sequence_has_goes_when_it_ends(rig: Rig) -> None:
    """Of a request whose reader has died, say, while another worker's answer was deleted."""
    rig.engine.add(spec("r", PROMPT, max_tokens=20))
    rig.engine.step()
    assert rig.engine.kv.erase(ROOT, PROMPT) == 0, "it is in use"
    rig.engine.cancel("r", 0)
    rig.settle()
    assert rig.left()[:2] == (0, 0)


class ErasingSchedule(TieredSchedule):
    """Now and then somebody's tokens are erased, running or not."""

    def meddle(self) -> None:
        if self.chance.random() < 0.5:
            super().meddle()
            return
        (name, choice), asked = self.chance.choice(list(self.specs.items()))
        ids = asked.prompt_ids + tuple(self.transcript.tokens[name, choice])
        self.engine.kv.erase(ROOT, ids[: self.chance.randint(0, len(ids))])
        self.engine.check_integrity()

    def step(self) -> None:
        if self.specs and self.chance.random() < 0.2:
            self.meddle()
        super().step()


@pytest.mark.parametrize("part", range(2))
def test_random_schedules(part: int) -> None:
    for seed in range(10_000 + part, 10_000 + SCHEDULES, 2):
        schedule = ErasingSchedule(seed)
        try:
            schedule.run()
            for _ in range(100):  # what was erased while it ran, or was on its way, goes
                if (maintained := schedule.engine.maintain()) is not None:
                    schedule.check_announced(maintained)
            schedule.check()
            assert not schedule.tiers._erasing
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        finally:
            schedule.close()
