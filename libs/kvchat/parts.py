"""Parts of a message, in the order in which they are read. Joined, they are the message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """Its arguments follow, before the next call begins. `index` counts the message's calls."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsGrew:
    """`text` is a part of a JSON object. A model that is cut, or errs, may leave it unfinished."""

    index: int
    text: str


Part = Said | Thought | CallBegan | ArgumentsGrew
