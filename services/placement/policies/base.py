"""The seam between placement and its policies. Pure.

A policy sees one `Question` and names one worker. Excluded workers are no candidates, and candidates may be empty. One
that needs more than this (what workers hold, what harm is done) is given it when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvproto.hash_ring import HashRing
from kvproto.messages import PlaceRequest
from services.placement.fleet import Worker


@dataclass(frozen=True, slots=True)
class Question:
    """One request to place."""

    key: str  # its place on the ring: session, else prefix
    ask: PlaceRequest
    ring: HashRing  # over all ready workers of the model, excluded ones too
    excluded: frozenset[str]
    candidates: Sequence[Worker]  # ready, of the model, not excluded; by id
    alive: Mapping[str, Worker]  # everybody, of every model and state
    load_of: Callable[[Worker], int]  # requests reported and booked


@dataclass(frozen=True, slots=True)
class Choice:
    worker: str
    why: str  # a short human sentence


class Policy(Protocol):
    """A way to choose. `name` is what requests and settings call it."""

    @property
    def name(self) -> str: ...

    def choose(self, question: Question) -> Choice | None:
        """None if nobody can take it; raises KvfleetError where the request itself is at fault."""
        ...
