"""The seam between placement and its policies. Pure.

A policy sees one `Question` and names one worker. Excluded workers are no candidates, and candidates may be empty. What
is known of the candidates as numbers stands in arrays, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvproto.hash_ring import HashRing
from kvproto.messages import PlaceRequest
from services.placement.fleet import Worker
from services.placement.workloads import Floats, View


@dataclass(frozen=True, slots=True)
class Question:
    """One request to place."""

    key: str  # its place on the ring: session, else the first tokens of its prompt
    parting: str  # another one: session, else the first block that nobody has, where prompts part ways
    ask: PlaceRequest
    ring: HashRing  # over all ready workers of the model, excluded ones too
    excluded: frozenset[str]
    candidates: Sequence[Worker]  # ready, of the model, not excluded; by id
    alive: Mapping[str, Worker]  # everybody, of every model and state
    loads: View  # of the candidates
    prompt_tokens: int
    matched: Floats  # `[tiers, candidates]` prompt tokens that one has in the tier or a faster one, as far as believed
    heat: float  # requests of about the last minute whose longest match ended where this one's does
    block_size: int


@dataclass(frozen=True, slots=True)
class Choice:
    """`prices` say what the candidates would have cost, in seconds: a row for each of `price_kernel.TERMS`, and their
    sum, `[8, candidates]`. None from a policy that does not reckon."""

    worker: str
    why: str  # a short human sentence
    prices: Floats | None = None


class Policy(Protocol):
    """A way to choose. `name` is what requests and settings call it."""

    @property
    def name(self) -> str: ...

    def choose(self, question: Question) -> Choice | None:
        """None if nobody can take it; raises KvfleetError where the request itself is at fault."""
        ...
