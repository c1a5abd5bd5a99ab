"""The seam between placement and its policies. Pure.

A policy sees one `Question` and names one worker. Excluded workers are no candidates, and candidates may be empty. What
is known of the candidates as numbers stands in arrays, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfleet.placement.index.prefix_index import Hashes
from kvfleet.placement.workers.fleet import Worker
from kvfleet.placement.workers.price_kernel import HOST
from kvfleet.placement.workers.workloads import Floats, View
from kvproto.hash_ring import HashRing
from kvproto.messages import PlaceRequest


@dataclass(slots=True)  # not frozen, like Choice: one is made for every decision, and that would cost twice as much
class Question:
    """One request to place. Nobody changes it."""

    key: str  # its place on the ring: session, else the first tokens of its prompt
    ask: PlaceRequest
    ring: HashRing  # over all ready workers of the model, excluded ones too
    excluded: frozenset[str]
    candidates: Sequence[Worker]  # ready, of the model, not excluded; by id
    alive: Mapping[str, Worker]  # everybody, of every model and state
    loads: View  # of the candidates
    prompt_tokens: int
    matched: Floats  # `[4, candidates]` of these that one has in the tier or a faster one, or can pull; as believed
    heat: float  # requests of about the last half hour whose longest match ended where this one's does
    hashes: Hashes  # of the prompt's blocks, if they are known
    depth: int  # how many of them from the start anybody has

    @property
    def held(self) -> Floats:
        """What each candidate holds itself: vaults and peers are there for all."""
        held: Floats = self.matched[HOST]
        return held

    def first_on_the_ring(self, equals: list[int]) -> tuple[str, int]:
        """Which of some candidates comes first, from the session's place on; else from that of the first block that
        nobody has, or of the last one: where prompts part ways."""
        place = self.key
        if not self.ask.session and len(self.hashes):
            place = self.hashes[min(self.depth, len(self.hashes) - 1)].tobytes().hex()
        numbers = {self.candidates[number].id: number for number in equals}
        return next((name, numbers[name]) for name in self.ring.walk(place) if name in numbers)


@dataclass(slots=True)
class Choice:
    """`prices` `[11, candidates]` are what `View.price` says they would have cost; None: the policy does not reckon."""

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
