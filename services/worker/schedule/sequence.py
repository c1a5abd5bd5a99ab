"""One request's tokens, blocks and state inside the engine. Pure; the engine thread owns it.

restoring ◀──its turn comes, blocks in lower tiers are worth it── waiting
    └─────────────────what came is on the device────────────────▶ waiting

waiting ──admit──▶ running ──▶ finished
   ▲ ▲                │ │
   │ └───preempt──────┘ │
   └──resume── paused ◀─┘ pause (from waiting and restoring too)

following ──the beam search that the first choice runs has ended──▶ finished
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from copy import copy
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvfleet.worker.blocks.content_index import common_prefix
from kvfleet.worker.port.sequence_spec import Key, SequenceSpec
from kvfleet.worker.port.tenant_costs import TenantAccount
from kvfleet.worker.schedule.tenant_shares import TenantShare
from kvfleet.worker.text.context_window import ContextWindow
from kvfleet.worker.text.text_stream import TextStream
from kvproto.block_hash import ForkedRoot, Root, chain, child, parent_of
from kvproto.messages import FinishReason, StopToken, Tier

if TYPE_CHECKING:
    from kvsampling.beam_search import BeamSearch
    from kvsampling.draw import Candidates
    from kvsampling.grammar import Matcher

AGE_S = 20.0  # of waiting are worth a level of priority


class SequenceState(Enum):
    WAITING = auto()
    RESTORING = auto()
    RUNNING = auto()
    PAUSED = auto()
    FOLLOWING = auto()  # a further choice of a beam search, which the first one runs
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """The model sees tokens `ids` of prompt and outputs; `start` tokens before them are out of the context. KV for the
    first `computed` is in `blocks`. `filled` leading blocks are full and in the content index, as far as they can be
    found; `passed` leading entries of `blocks` are -1: released, as no later token reaches them. `hashes` is the chain
    over all full blocks of `ids`."""

    spec: SequenceSpec
    block_size: InitVar[int]
    arrived: InitVar[tuple[int, float]]  # its number in the order of arrival, and when
    _: KW_ONLY
    window: ContextWindow
    stop_ids: frozenset[int]
    text: TextStream
    siblings: list[Sequence]  # all live choices of this attempt, this one too
    account: TenantAccount
    matcher: Matcher | None = None  # of a grammar
    beams: BeamGroup | None = None  # it is the first choice of a beam search; its own tokens are the prompt's alone
    told: tuple[int, ...] = ()  # tokens of a beam search's choice that an earlier attempt has told
    lead: Sequence | None = None  # this is a beam of that one
    arrival: int = field(init=False)
    enqueued: float = field(init=False)
    share: TenantShare = field(init=False)  # while it waits or runs
    rank: tuple[float, int] = field(init=False)  # never changes; smaller ones may take blocks from larger ones
    banned: tuple[int, ...] = field(init=False)  # until `min_tokens` are out
    num_outputs: int = field(init=False)
    num_prompt: int = field(init=False)  # as used by the first attempt, whatever was dropped since
    scored: int = field(init=False)  # leading tokens of the prompt that need no scores any more
    start: int = field(init=False)
    ids: list[int] = field(init=False)
    root: Root = field(init=False)
    hashes: list[bytes] = field(init=False)
    # Only for penalties and grammars; arrays, which a sampler reads without a Python object per token.
    prompt_seen: array[int] | None = None
    outputs: array[int] | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    filled: int = 0
    passed: int = 0
    state_slot: int = -1  # of its recurrent state, while it has blocks
    snapshots: list[tuple[int, int]] = field(default_factory=list)  # that its next slice takes: tokens before, slot
    charged: int = 0  # leading tokens charged to the tenant
    leader: Sequence | None = None  # computes the first `shared` tokens while this one waits
    shared: int = 0
    cached_tokens: int = 0
    lossy: bool = False  # some of its KV is, or was computed on such
    private: bool = False  # what it computes is no longer listed
    restores: int = 0  # begun since it last ran
    restored: dict[Tier, int] = field(default_factory=dict)  # tokens brought to the device for it
    started: bool = False
    stop_token: StopToken | None = None  # that ended it
    state: SequenceState = SequenceState.WAITING

    def __post_init__(self, block_size: int, arrived: tuple[int, float]) -> None:
        self.arrival, self.enqueued = arrived
        spec, window, prompt = self.spec, self.window, len(self.spec.prompt_ids)
        self.rank = self.enqueued - AGE_S * spec.priority, self.arrival
        self.banned = tuple(sorted(self.stop_ids))
        self.num_outputs = len(spec.output_ids)
        self.start, first = window.start(prompt + self.num_outputs), window.start(prompt)
        self.num_prompt = prompt - first
        self.scored = self.num_prompt if spec.scored is None else min(max(spec.scored, 1), self.num_prompt)
        wants = spec.sampling
        if wants.presence_penalty or wants.frequency_penalty or wants.repetition_penalty != 1.0:
            self.prompt_seen = array("q", spec.prompt_ids[first:])
        if self.prompt_seen is not None or self.matcher is not None:
            self.outputs = array("q", spec.output_ids)
        self.ids = [*spec.prompt_ids, *spec.output_ids][self.start :]
        # What no longer begins with the public prefix must not be chained under its root, which all tenants share.
        self.root = spec.root.own if self.start and isinstance(spec.root, ForkedRoot) else spec.root
        named = spec.location.names if spec.location is not None and not self.start else ()
        self.hashes = [name.hash for name in named]  # hashed already, for the look into vaults
        if len(named) != len(self.ids) // block_size:
            self.hashes = chain(self.root, self.ids, block_size)

    @property
    def key(self) -> Key:
        return self.spec.request, self.spec.attempt, self.spec.choice

    @property
    def is_fresh(self) -> bool:
        """It waits, and nothing of it was ever sent."""
        waits = self.state in (SequenceState.WAITING, SequenceState.FOLLOWING)
        return waits and not (self.started or self.spec.output_ids or self.told)

    @property
    def whole(self) -> Sequence:
        """What is admitted and ends: of a beam the lead."""
        return self.lead or self

    @property
    def has_ended(self) -> bool:
        return self.whole.state is SequenceState.FINISHED

    @property
    def width(self) -> int:
        """How many sequences run for it at once."""
        return 1 if self.beams is None else self.beams.search.asked.width

    @property
    def held(self) -> list[int]:
        """Its blocks; those that several of its beams hold as often."""
        if self.beams is None:
            return self.blocks
        return self.blocks + [block for beam in self.beams.running for block in beam.blocks]

    @property
    def drawn(self) -> int:
        """Tokens after the prompt, those of earlier attempts too; of each beam."""
        return self.num_outputs if self.beams is None else self.beams.search.length

    @property
    def is_scored(self) -> bool:
        """Nothing of its prompt is to be scored any more. Until then what is cached gives no scores."""
        return self.scored >= self.num_prompt

    @property
    def remaining(self) -> int:
        """Known tokens without KV."""
        return len(self.ids) - self.computed

    @property
    def end(self) -> FinishReason | None:
        """Why generation ends now, stop tokens aside; None if it goes on."""
        if self.text.stop:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_outputs >= self.window.max_tokens and self.is_scored else None

    @property
    def is_full(self) -> bool:
        return self.window.limit is not None and len(self.ids) >= self.window.limit

    def append(self, token: int, block_size: int) -> None:
        self.ids.append(token)
        self.num_outputs += 1
        if self.outputs is not None:
            self.outputs.append(token)
        if len(self.ids) % block_size == 0:
            self.hashes.append(child(parent_of(self.root, self.hashes, len(self.hashes)), self.ids[-block_size:]))

    def slide(self, block_size: int) -> None:
        """Drop the oldest tokens: the rest is computed anew from position 0. The sequence holds no blocks."""
        start = self.window.start(len(self.spec.prompt_ids) + self.num_outputs)
        del self.ids[: start - self.start]
        self.start = start
        if isinstance(self.root, ForkedRoot):
            self.root = self.root.own
        self.hashes = chain(self.root, self.ids, block_size)
        self.charged = 0

    def fork(self) -> Sequence:
        """A beam of the same tokens, without blocks. No block of a beam is listed: what is never told has no name by
        which it could be erased."""
        beam = copy(self)
        beam.ids, beam.hashes, beam.blocks = self.ids.copy(), self.hashes.copy(), []
        beam.outputs = None if self.outputs is None else self.outputs[:]
        beam.lead, beam.beams, beam.private = self.whole, None, True
        beam.state_slot, beam.snapshots = -1, []
        return beam

    def agrees_with(self, sibling: Sequence) -> int:
        """How many leading tokens it shares with another choice of its attempt."""
        if self.start != sibling.start:
            return 0
        known = max(0, len(self.spec.prompt_ids) - self.start)
        return known + common_prefix(self.ids[known:], sibling.ids[known:])

    def block_ids(self, block_index: int, block_size: int) -> Items[int]:
        """Tokens of the `block_index`-th block that have KV."""
        start = block_index * block_size
        return self.ids[start : min(start + block_size, self.computed)]


@dataclass(eq=False, slots=True)
class BeamGroup:
    """The beams of one search, as sequences with blocks of their own; none before the prompt is computed."""

    search: BeamSearch
    running: list[Sequence] = field(default_factory=list)
    branches: list[tuple[Sequence, int]] = field(default_factory=list)  # the next: which they continue, their token
    found: list[Candidates] = field(default_factory=list)  # in this step, of the first beams

    @property
    def has_begun(self) -> bool:
        return bool(self.running or self.branches)


def level_of(priority: int, waited: float) -> int:
    """The priority plus one for every AGE_S since arrival, so that all is served in the end. Larger goes first."""
    return priority + int(waited / AGE_S)
