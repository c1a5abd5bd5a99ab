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
    matched: (
        Floats  # `[4, candidates]` prompt tokens that one has in the tier or a faster one, or can pull; as believed
    )
    heat: float  # requests of about the last half hour whose longest match ended where this one's does
    hashes: Hashes  # of the prompt's blocks, if they are known
    depth: int  # how many of them from the start anybody has

    @property
    def held(self) -> Floats:
        """What each candidate holds itself: vaults and peers are there for all."""
        held: Floats = self.matched[HOST]
        return held

    @property
    def demand_keeper(self) -> str:
        """Another place on the ring: the session's, else that of the first block that nobody has, or of the last one:
        where prompts part ways."""
        if self.ask.session or not len(self.hashes):
            return self.key
        block: bytes = self.hashes[min(self.depth, len(self.hashes) - 1)].tobytes()
        return block.hex()


@dataclass(slots=True)
class Choice:
    """`prices` say what the candidates would have cost, in seconds: a row for each of `price_kernel.TERMS`, and their
    sum, then the tokens restored from each tier, `[11, candidates]`. None from a policy that does not reckon."""

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
