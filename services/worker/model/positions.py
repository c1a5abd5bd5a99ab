"""Positions that a model is tried at: where it may begin to compute otherwise than at its first ones. Pure.

Models change past lengths that their configuration names: a window, or the context that they were first trained on,
beyond which Ministral 3 scales its queries. Powers of four are for what no name tells; the last one is past all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

FIRST = (0, 1, 2)
MOST = 48  # a trial costs as much as a step of so many tokens; the last positions are past all thresholds
_WORDS = ("position", "window", "chunk", "context", "ctx", "length", "seq", "floor")


def trial_positions(config: Any, context_length: int) -> tuple[int, ...]:
    """In order, each below `context_length`: the first ones, those around every threshold, powers of four, the last."""
    around = {at + step for at in _lengths(config.to_dict()) for step in (-1, 0, 1)}
    powers = takewhile(lambda at: at < context_length, (4**power for power in range(1, 32)))
    wanted = sorted(at for at in {*FIRST, *around, *powers, context_length - 1} if 0 <= at < context_length)
    return tuple(wanted[: len(FIRST)] + wanted[len(FIRST) :][-(MOST - len(FIRST)) :])


def _lengths(settings: object, name: str = "") -> Iterator[int]:
    """Whole numbers under names that speak of positions, at any depth."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _lengths(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _lengths(value, name)
    elif isinstance(settings, int) and not isinstance(settings, bool) and any(word in name for word in _WORDS):
        yield settings
