"""Subjects with wildcards, and who is interested in one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


def matches(pattern: str, subject: str) -> bool:
    if "*" not in pattern and ">" not in pattern:
        return pattern == subject
    mine, yours = pattern.split("."), subject.split(".")
    for at, token in enumerate(mine):
        if token == ">":
            return len(yours) > at
        if at >= len(yours) or token not in ("*", yours[at]):
            return False
    return len(mine) == len(yours)


class Interest(Generic[T]):
    """What was put under patterns, in that order."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[T, None]] = {}
        self._wild: dict[str, dict[T, None]] = {}
        self._known: dict[str, list[T]] = {}  # by subject

    def put(self, pattern: str, one: T) -> None:
        among = self._wild if "*" in pattern or ">" in pattern else self._exact
        among.setdefault(pattern, {})[one] = None
        if among is self._wild:
            self._known.clear()
        else:
            self._known.pop(pattern, None)

    def drop(self, pattern: str, one: T) -> None:
        among = self._wild if "*" in pattern or ">" in pattern else self._exact
        found = among.get(pattern, {})
        found.pop(one, None)
        if not found:
            among.pop(pattern, None)
        if among is self._wild:
            self._known.clear()
        else:
            self._known.pop(pattern, None)

    def of(self, subject: str) -> list[T]:
        known = self._known.get(subject)
        if known is None:
            known = [*self._exact.get(subject, ())]
            for pattern, some in self._wild.items():
                if matches(pattern, subject):
                    known += some
            if len(self._known) > 4096:
                self._known.clear()
            self._known[subject] = known
        return known


def any_matches(patterns: Iterable[str], subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in patterns)


def covers(pattern: str, other: str) -> bool:
    """Whether all that matches `other`, a pattern, matches `pattern`."""
    mine, yours = pattern.split("."), other.split(".")
    for at, token in enumerate(mine):
        if token == ">":
            return len(yours) > at
        if at >= len(yours) or yours[at] == ">" or (token != "*" and token != yours[at]):
            return False
    return len(mine) == len(yours)
