"""What the worker's loop knows of an engine, and of the blocks below and beside it. Pure.

    serve ──▶ EnginePort   sequences, what is cached, how busy it is    the own engine's thread, a vLLM server
          ├─▶ TierPort     blocks of vaults and other workers           the data plane
          └─▶ TextPort     texts and their tokens                       the model's tokenizer

The first two are used on the loop's thread and never block it. An engine hands its results, in the order in which they
came about, to the callback that it was made with; an answer comes after all results that were there before it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvfleet.worker.blocks.chain_location import BlockName
from kvfleet.worker.port.capacity import Attempt
from kvfleet.worker.port.engine_counters import EngineCounters
from kvfleet.worker.port.sequence_spec import Locate, SequenceSpec
from kvproto.block_hash import Root
from kvproto.messages import Adapter, GenerateRequest, Grammar, HotChain, Inspection, Load, Rates, Tier
from kvservice.distribution import Distribution

Names = Sequence[BlockName]  # of a chain, from its first block on
Hashed = Mapping[tuple[int, ...], Names]  # a request's chains, by the output of a choice so far


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What never changes while the engine lives. `block_bytes` of KV in one block on the device; `kv_format` names the
    bytes' layout, which must be that of a worker that takes them; empty where they never leave the engine."""

    blocks: int
    block_bytes: int
    kv_format: bytes


class EnginePort(Protocol):
    """Awaitables raise EngineFailure where the engine is gone. A sequence that is submitted ends in one terminal output
    whatever happens, those of a dead engine in EngineFailure."""

    facts: EngineFacts
    counters: EngineCounters
    cancel_to_free: Distribution  # seconds until the blocks of what was cancelled were free
    is_ready: bool  # it takes sequences; one that does not may come back, and what is submitted meanwhile fails
    measured: tuple[Load, Rates]  # not older than about a second

    @property
    def step_age_s(self) -> float:
        """How long the present step has taken so far."""
        ...

    def learn(self, grammar: Grammar, tenant: str) -> Awaitable[None]:
        """Before a sequence that has one is submitted. Raises InvalidRequest that says why no output can follow it."""
        ...

    def submit(self, spec: SequenceSpec) -> None: ...

    def cancel(self, request: str, attempt: int, received: Sequence[int] = ()) -> None:
        """End an attempt's sequences with Cancelled. KV past the tokens of each choice that its last reader has
        `received` is forgotten: no erase could name it."""
        ...

    def pause(self, request: str, attempt: int) -> None:
        """Let others have its place and blocks until `resume`."""
        ...

    def resume(self, request: str, attempt: int) -> None: ...

    def expect_return(self, request: str, attempt: int, soonest_s: float, latest_s: float) -> None:
        """The conversation of an attempt that ended is likely to go on in that time. An engine whose record does not
        say `pauses` does nothing about it."""
        return

    def make_room(self, request: str, attempt: int, count: int) -> Awaitable[frozenset[Attempt]]:
        """Fail `count` fresh sequences of lower priority, or else this attempt if fresh. Returns the attempts."""
        ...

    def let_go(self, attempts: Sequence[Attempt], *, keep: bool) -> Awaitable[None]:
        """Drop attempts without an output: they go on elsewhere. With `keep` their blocks go to vaults as well."""
        ...

    def holdings(self) -> Awaitable[tuple[Mapping[Tier, Sequence[bytes]], int]]:
        """All full blocks, and the digest under which events lead to them."""
        ...

    def inspect(self, root: Root, ids: Sequence[int]) -> Awaitable[Inspection]: ...

    def erase(self, root: Root, ids: Sequence[int], keep: int) -> Awaitable[int]:
        """Forget KV of `ids` past the first `keep`, unless others continue it. Returns how many blocks went."""
        ...

    def read_kv(self, root: Root, ids: Sequence[int], layer: int) -> Awaitable[tuple[Any, Any]]:
        """K and V `[tokens, kv_heads, head_dim]` of the cached part. Raises IndexError for an unknown layer."""
        ...


class AdapterPort(Protocol):
    """Of an engine that takes LoRA adapters of its model, at any time."""

    @property
    def loaded(self) -> tuple[Adapter, ...]: ...

    async def load(self, name: str, path: str) -> None:
        """Raises InvalidRequest, or EngineFailure where the engine is gone."""
        ...

    async def unload(self, name: str) -> None:
        """Sequences that it has go on. Raises NotFound, or EngineFailure where the engine is gone."""
        ...


class TextPort(Protocol):
    """See `text.model_text`."""

    @property
    def special(self) -> Mapping[str, int]: ...

    def encode(self, text: str, *, begins: bool, field: str) -> tuple[int, ...]: ...

    def generated(self, prompt_ids: Sequence[int], ids: Sequence[int], *, skip_special: bool) -> str: ...


class TierPort(Protocol):
    """`meet` is awaited before a worker is asked for blocks, unless it is None: its address is known."""

    @property
    def lends(self) -> bool:
        """Whether peers can read blocks from here at all."""
        ...

    @property
    def is_lending(self) -> bool:
        """Whether peers read blocks from here right now."""
        ...

    def meet(self, worker: str) -> Awaitable[None] | None: ...

    def would_look(self, request: GenerateRequest, tokens: int) -> bool: ...

    def hash(self, request: GenerateRequest, root: Root, ids: tuple[int, ...]) -> Hashed:
        """Takes long for a long request. Called on any thread."""
        ...

    def locate(
        self, request: GenerateRequest, root: Root, ids: tuple[int, ...], hashed: Hashed, traceparent: str
    ) -> Locate:
        """Begin to ask for a request's chains. Fresh choices share their prompt, and so one question."""
        ...

    async def in_vaults(self, root: Root, ids: Sequence[int]) -> int:
        """How many leading blocks vaults have, if they answer in time."""
        ...

    async def at_peer(self, names: Names, peer: str, limit_s: float) -> int:
        """How many leading blocks another worker has, if it answers in time."""
        ...

    async def rates(self) -> Mapping[str, float]:
        """Bytes per second by tier, of those that there are."""
        ...

    async def preload(self, chain: HotChain, limit_s: float) -> None:
        """Bring a chain to the device, or what comes of it in time."""
        ...

    async def offer(self, chains: Sequence[HotChain]) -> None:
        """Have vaults keep them. Returns when they are there."""
        ...

    async def leaves_soon(self) -> bool:
        """What runs is about to be handed over. Whether another worker can go on from where it is; asked again until
        then."""
        return True

    async def settled(self) -> None:
        """Until nothing is on its way to lower tiers."""
        ...
