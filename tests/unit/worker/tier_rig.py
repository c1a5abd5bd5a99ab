"""An engine on the fake runner with tiers below it, and ways to drive it, for the tests of this folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine_rig import ROOT, Transcript, spec
from memory_remote import Faults, MemoryRemote

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.chain_location import ChainLocation, names_of
from kvfleet.worker.blocks.state_slots import StateSlots
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.fake import FakePace, FakeRunner
from kvfleet.worker.network.lending import PeerStore
from kvfleet.worker.port.outputs import SequenceStarted, StepResult
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.host_states import HostStates
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.block_hash import Root, chain
from kvproto.messages import Tier
from tests.support.id_detokenizer import IdDetokenizer
from tests.support.waiting import LIMIT_S

SIZE = 4


class TieredRig:
    """`host`: blocks of the host tier, 0: none. Blocks go down whatever experience says unless `choosy`.

    `clock`: of restores; one that stands still lets none be late."""

    def __init__(
        self,
        *,
        blocks: int = 32,
        host: int = 64,
        remote: bool = False,
        faults: Faults | None = None,
        choosy: bool = False,
        slots: int = 8,
        prefill_tokens_per_s: float | None = 500.0,
        clock: Callable[[], float] = time.monotonic,
        states: int = 0,
        host_states: int = 0,
    ) -> None:
        runner = FakeRunner(
            num_blocks=blocks,
            block_size=SIZE,
            vocab_size=1000,
            context_length=512,
            num_states=states,
            pace=FakePace(prefill_tokens_per_s=prefill_tokens_per_s),
        )
        self.pool = BlockPool(blocks, SIZE)
        memory = runner.memory
        self.host = HostTier(memoryview(bytearray(host * memory.block_bytes)), memory.block_bytes, SIZE)
        self.remote = MemoryRemote(memory.block_bytes, faults=faults) if remote else None
        self.woken = threading.Event()
        self.slots = StateSlots(states, SIZE, 2) if states else None
        self.states = None
        if self.slots is not None and runner.state_memory is not None:
            room = memoryview(bytearray(host_states * runner.state_memory.block_bytes))
            self.states = HostStates(self.slots, runner.state_memory, room)
        self.tiers = Tiers(self.pool, memory, self.host, self.remote, self.woken.set, clock, states=self.states)
        if not choosy:
            self.tiers.reuse.is_worth = lambda root, offload_s, recompute_s: True  # type: ignore[method-assign]
        scheduler = Scheduler(self.pool, token_budget=64, slots=slots, states=self.slots)
        if prefill_tokens_per_s is not None:  # steps of few tokens tell the pacer nothing
            times = scheduler.pacer.times
            times.prompt_seconds = lambda position, tokens: tokens / prefill_tokens_per_s  # type: ignore[method-assign]
        self.engine = Engine(runner, self.pool, scheduler, IdDetokenizer(), tiers=self.tiers)
        self.runner = runner
        self.transcript = Transcript()
        self.started: dict[str, SequenceStarted] = {}
        self.results: list[StepResult] = []

    def close(self) -> None:
        self.tiers.close()
        if self.remote is not None:
            self.remote.close()

    # ------------------------------------------------------------------ driving

    def add(
        self,
        request: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        root: Root = ROOT,
        exact: bool = False,
        peer: str = "",
        **fields: object,
    ) -> None:
        location = None
        if self.remote is not None:
            names = names_of(root, chain(root, prompt, SIZE), prompt, SIZE)
            finding = self.remote.look(names, exact=exact, peer=peer, on_ready=self.woken.set)
            location = ChainLocation(names, finding, peer)
        asked = spec(request, prompt, max_tokens, exact=exact, location=location, **fields)
        self.engine.add(replace(asked, root=root))

    def turn(self) -> None:
        self.woken.clear()
        if (maintained := self.engine.maintain()) is not None:
            self.results.append(maintained)
        if self.engine.has_work:
            result = self.engine.step()
            self.results.append(result)
            self.transcript.take(result)
            for output in result.outputs:
                if isinstance(output, SequenceStarted):
                    self.started[output.request] = output
        else:
            self.woken.wait(0.01)
        self.engine.check_integrity()

    def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, "it never comes"
            self.turn()

    def run(self, request: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> list[int]:
        """One request to its end. Returns its tokens."""
        self.add(request, prompt, max_tokens, **fields)  # type: ignore[arg-type]
        self.until(lambda: (request, 0) in self.transcript.ends)
        return self.transcript.tokens[request, 0]

    def settle(self) -> None:
        """Until nothing is being copied or written."""
        offloader = self.tiers.offloader
        self.until(lambda: not (offloader.has_work or offloader.held_on_host()))

    def flush_device(self) -> None:
        """Others need all blocks of the device."""
        blocks = self.pool.allocate(self.pool.available)
        self.pool.release(blocks)

    def flush_host(self) -> None:
        self.host.pool.release(self.host.allocate(self.host.pool.available))

    def lend(self, other: TieredRig, ids: Sequence[int]) -> int:
        """What this one has of a chain is what `other` can fetch from its peer. Returns how many blocks and states."""
        assert other.remote is not None
        names = [one for name in names_of(ROOT, chain(ROOT, ids, SIZE), ids, SIZE) for one in (name, name.state())]
        store = PeerStore(self.tiers, lambda work: work(self.engine))
        served = store.get(ROOT, [name.hash for name in names], False)
        lent = [(name, block) for name, block in zip(names, served.blocks, strict=True) if block is not None]
        for name, (header, payload) in lent:
            assert header.is_genuine()
            assert header.matches(payload)
            other.remote.kept[Tier.PEER][name.hash] = name, bytes(payload), header.lossy
        served.release()
        assert store.get(bytes(16), [name.hash for name in names], False).blocks == [None] * len(names)
        return len(lent)

    def cached(self, request: str) -> dict[str, int]:
        """What a request found, by tier, as its worker says."""
        started = self.started[request]
        restored = {tier.value: tokens for tier, tokens in started.restored.items()}
        on_device = started.cached_tokens - sum(restored.values())
        return ({Tier.DEVICE.value: on_device} if on_device else {}) | restored
