"""A core with workers that are said to hold things, for tests of decisions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from placement_build import a_beat, a_record, an_ask

from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Answer, PlaceAsked, Tick, WorkerRegistered
from kvfleet.placement.index.changes import TIERS, Changes, HolderChange
from kvfleet.placement.index.prefix_index import Hashes
from kvfleet.placement.workers.prompts import HashedPrompts, address_spaces
from kvproto.messages import (
    BookedBatch,
    Heartbeat,
    Load,
    Milestone,
    Milestones,
    Passed,
    Placement,
    PlaceRequest,
    Rates,
    State,
    Tier,
)

FLEET_KEY = b"key"
RATE = 8000.0  # prefill tokens/s of every worker
BLOCK_BYTES = 1_000_000


def tokens(seed: int, count: int) -> tuple[int, ...]:
    """A prompt that begins like no other."""
    drawn = random.Random(seed)
    return tuple(drawn.randrange(50_000) for _ in range(count))


class Rig:
    """Placement with `workers`, all idle and measured. `replicas` cores hear everything, as over NATS."""

    def __init__(
        self, *workers: str, policy: str = "cost", replicas: int = 1, slots: int = 64, blocks: int = 65_536
    ) -> None:
        self.now = 0.0
        self.prompts = HashedPrompts(FLEET_KEY)
        self.slots = slots
        self.cores = [
            PlacementCore(
                f"p{number}",
                f"_plc.p{number}",
                lambda: 0.5,
                PlacementConfig(policy=policy, index_blocks=blocks),
                prompts=self.prompts,
                unix_ms=lambda: int(self.now * 1000),
            )
            for number in range(replicas)
        ]
        self.restore: dict[str, dict[str, float]] = {}  # measured bytes/s by tier, of some workers
        self.seq: Counter[str] = Counter()
        self.digest: Counter[str] = Counter()
        for worker in workers:
            self.join(worker)

    @property
    def core(self) -> PlacementCore:
        return self.cores[0]

    def tell(self, event: object) -> None:
        for core in self.cores:
            core.handle(event, self.now)  # type: ignore[arg-type]

    def join(self, worker: str, *, epoch: str = "e1", **fields: object) -> None:
        self.tell(WorkerRegistered(replace(a_record(worker, epoch=epoch), **fields)))  # type: ignore[arg-type]
        self.beat(worker, epoch=epoch)

    def join_tiered(self, *workers: str, restore: dict[str, float], rate: float = RATE, **fields: object) -> None:
        """Workers that measured what restoring costs them, and that others can pull from."""
        about = {"data_plane": ("tcp:127.0.0.1:1",), "kv_format": b"f" * 16, "block_bytes": BLOCK_BYTES} | fields
        for worker in workers:
            self.restore[worker] = restore
            self.tell(WorkerRegistered(replace(a_record(worker), **about)))  # type: ignore[arg-type]
            self.beat(worker, rate=rate)

    def join_vault(self, *vaults: str, epoch: str = "e1") -> None:
        for vault in vaults:
            for core in self.cores:
                core.join_vault(vault, epoch)

    def beat(
        self,
        worker: str,
        *,
        epoch: str = "e1",
        queued: int = 0,
        waiting: int = 0,
        running: int = 0,
        rate: float = RATE,
        tokens_per_s: float = 0.0,
        state: State = State.READY,
    ) -> None:
        load = Load(waiting=waiting, running=running, slots=self.slots, queued_prefill_tokens=queued)
        rates = Rates(rate, tokens_per_s / max(running, 1), tokens_per_s, self.restore.get(worker, {}))
        beat = Heartbeat(worker, epoch, state, load, rates, self.seq[worker], self.digest[worker])
        self.tell(beat)

    def wait(self, seconds: float) -> None:
        """Time passes; workers go on saying that they are idle."""
        self.now += seconds
        self.tell(Tick())

    def hashes(self, ids: Sequence[int], tenant: str = "public") -> Hashes:
        return self.prompts.hashes(address_spaces(a_record("any"))["demo"], tenant, an_ask(prompt_ids=tuple(ids)))

    def store(
        self,
        worker: str,
        ids: Sequence[int],
        *,
        epoch: str = "e1",
        removed: bool = False,
        tier: Tier = Tier.DEVICE,
        blocks: slice = slice(None),
    ) -> None:
        """The worker, or vault, tells that it holds all full blocks of `ids`, or some of them, or no more."""
        hashes = self.hashes(ids)[blocks]
        self.seq[worker] += 1
        digest = 0
        for low in hashes[:, 0].tolist():
            digest ^= low
        self.digest[worker] ^= digest
        change = HolderChange(TIERS.index(tier), removed, hashes)
        changes = Changes(epoch, self.seq[worker], (change,), digest)
        for core in self.cores:
            core.indexer.on_changes(worker, changes, self.now)

    def place(
        self, request: str, ids: Sequence[int] = (), *, replica: int = 0, shared: bool = True, **fields: object
    ) -> Placement:
        """One decision; the other replicas hear of the booking unless it is not `shared`."""
        ask: PlaceRequest = an_ask(request, prompt_ids=tuple(ids), **fields)
        core = self.cores[replica]
        placement = None
        for action in core.handle(PlaceAsked("_INBOX.x", "public", ask), self.now):
            if isinstance(action, Answer):
                placement = action.placement
            elif isinstance(action, BookedBatch) and shared:
                self.tell(BookedBatch(core.placement, action.items))
        assert placement is not None
        return placement

    def pass_(
        self,
        worker: str,
        request: str,
        *passed: Passed,
        prompt: int = 0,
        cached: int | dict[str, int] = 0,
        attempt: int = 0,
    ) -> None:
        """Milestones of a request, in order."""
        found = cached if isinstance(cached, dict) else {"device": cached} if cached else {}
        items = tuple(Milestone("public", request, attempt, one, 0.1, prompt, found) for one in passed)
        self.tell(Milestones(worker, "e1", items))

    def end(
        self, worker: str, request: str, *, attempt: int = 0, output_tokens: int = 0, code: str | None = None
    ) -> None:
        one = Milestone("public", request, attempt, Passed.ENDED, 0.1, output_tokens=output_tokens, code=code)
        self.tell(Milestones(worker, "e1", (one,)))

    def finish(self, placement: Placement, ids: Sequence[int], *, stores: bool = True) -> None:
        """The worker does what it was given, at once, and tells of it."""
        cached = placement.expected_hit.get("device", 0)
        self.pass_(
            placement.worker,
            placement.request,
            Passed.ACCEPTED,
            Passed.STARTED,
            Passed.FIRST_TOKEN,
            prompt=len(ids),
            cached=cached,
        )
        if stores:
            self.store(placement.worker, ids)
        self.pass_(placement.worker, placement.request, Passed.ENDED)


def spread(placements: Sequence[Placement]) -> float:
    """Largest share over mean, of the workers that were given anything."""
    counts = Counter(placement.worker for placement in placements)
    return max(counts.values()) * len(counts) / len(placements)


__all__ = ["BLOCK_BYTES", "RATE", "Rig", "a_beat", "spread", "tokens"]
