"""The seam between placement and its policies: a policy sees one `Question` and names one worker. Pure."""

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


@dataclass(slots=True)  # not frozen, like Choice: there is one for every decision, and it would cost twice as much
class Question:
    """One request to place; it does not change. Arrays are in the order of the candidates."""

    key: str  # its place on the ring: session, else the first tokens of its prompt
    ask: PlaceRequest
    ring: HashRing  # over all ready workers of the model, excluded ones too
    excluded: frozenset[str]
    candidates: Sequence[Worker]  # ready, of the model, not excluded; by id; may be empty
    alive: Mapping[str, Worker]  # all workers, of every model and state
    loads: View  # of the candidates
    prompt_tokens: int
    matched: Floats  # `[4, candidates]` prompt tokens in the tier or a faster one, as believed
    heat: float  # requests of about the last half hour whose longest match ended where this one's does
    hashes: Hashes  # of the prompt's blocks, if they are known
    depth: int  # blocks from the start that any candidate has

    @property
    def held(self) -> Floats:
        """Tokens that each candidate holds itself."""
        held: Floats = self.matched[HOST]
        return held

    def first_on_the_ring(self, equals: list[int]) -> tuple[str, int]:
        """The first of some candidates, by numbers, from the session's place on; else from that of the first block that
        is new, or of the last one: where prompts part ways."""
        place = self.key
        if not self.ask.session and len(self.hashes):
            place = self.hashes[min(self.depth, len(self.hashes) - 1)].tobytes().hex()
        numbers = {self.candidates[number].id: number for number in equals}
        return next((name, numbers[name]) for name in self.ring.walk(place) if name in numbers)


@dataclass(slots=True)
class Choice:
    worker: str
    why: str  # a short human sentence
    prices: Floats | None = None  # `View.price`, if the policy used it


class Policy(Protocol):
    """`name` is that of requests and settings."""

    @property
    def name(self) -> str: ...

    def choose(self, question: Question) -> Choice | None:
        """None if no worker can take it; raises KvfleetError for a wrong request."""
        ...
