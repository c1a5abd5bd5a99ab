"""What an engine is asked to generate: one choice of one attempt. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvfleet.worker.blocks.chain_location import ChainLocation
from kvproto.block_hash import Root
from kvproto.messages import Sampling, Tier

Key = tuple[str, int, int]  # request, attempt, choice
Locate = Callable[[int], ChainLocation | None]  # a choice's chain


@dataclass(frozen=True, slots=True)
class Restored:
    """One tier's part of one restore."""

    tier: Tier
    began: float
    ended: float
    wanted: int
    blocks: int
    nbytes: int
    failure: str = ""


@dataclass(slots=True)
class SequenceTrace:
    """Of a traced sequence, in the engine's clock. The engine's thread fills it, never per token; the loop reads it
    once the sequence has ended."""

    enqueued: float | None = None
    admitted: float | None = None  # into the first step that it runs in
    prefilled: float | None = None  # its first new token was drawn
    ended: float | None = None
    chunks: int = 0  # of prompt, also after a preemption
    fed_tokens: int = 0  # in chunks
    drawn_tokens: int = 0  # by this attempt
    steps: int = 0  # of the engine between the first token and the end
    preemptions: int = 0
    restores: list[Restored] = field(default_factory=list)
    steps_before: int = 0  # the engine's count at the first token


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """An earlier attempt generated `output_ids`, and its client has `text_sent` characters of them. `root` starts the
    block hash chain (16 bytes, salted per tenant), and is an `adapter`'s own, if one is named. `deadline` is monotonic.
    `choice` numbers the continuations of one prompt, which share its blocks."""

    request: str
    attempt: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    root: Root
    output_ids: tuple[int, ...] = ()
    text_sent: int = 0
    tenant: str = "public"
    adapter: str = ""
    priority: int = 0
    deadline: float | None = None
    choice: int = 0
    exact: bool = False  # nothing lossy is used
    trace: SequenceTrace | None = None  # of a traced request
    location: ChainLocation | None = None
    scored: int | None = None  # leading tokens of the prompt that need no scores; None: no token does
