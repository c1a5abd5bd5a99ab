"""What a session's requests computed beside its history: turns that were cut, choices it did not go on with. Pure.

    history   0 1 2 3 4 5 6 7 8
                    │   └ 6' 7'         Stray(start=6, ids=(6', 7'))
                    └ 4' 5' 6'          Stray(start=4, ids=(4', 5', 6'))

They are remembered so that their blocks can be erased with the session's, wherever they are. It is bounded: what is too
much is erased at once instead, the oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvproto.messages import Stray

MAX_STRAYS = 64
MAX_IDS = 32_768  # of all strays of a session together

Ids = tuple[int, ...]


def agreeing(one: Ids, other: Ids) -> int:
    """How many leading ids they have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def beside(history: Ids, prompt: Ids, outputs: Iterable[Sequence[int]]) -> list[Stray]:
    """What a request made of its prompt, choice by choice, if it is not to be the history."""
    start = agreeing(history, prompt)
    return [Stray(start, prompt[start:] + tuple(ids)) for ids in outputs]


def moved(strays: Iterable[Stray], before: Ids, history: Ids) -> list[Stray]:
    """The strays beside `history`, which takes the place of `before`: what is left of that is one of them."""
    fork = agreeing(before, history)
    return [Stray(fork, before[fork:])] + [
        one if one.start <= fork else Stray(fork, before[fork : one.start] + one.ids) for one in strays
    ]


def settled(strays: Iterable[Stray], history: Ids) -> list[Stray]:
    """Each from where it really leaves the history, in the same order; without those that another one begins with."""
    found: list[Stray] = []
    for one in strays:
        same = agreeing(one.ids, history[one.start : one.start + len(one.ids)])
        stray = Stray(one.start + same, one.ids[same:])
        if not any(_begins(other, stray) for other in found):
            found = [other for other in found if not _begins(stray, other)]
            found.append(stray)
    return [one for one in found if one.ids]


def bounded(strays: Iterable[Stray]) -> tuple[list[Stray], list[Stray]]:
    """Those that are remembered, and those that are too much."""
    kept: list[Stray] = []
    dropped: list[Stray] = []
    for one in strays:
        (kept if len(one.ids) <= MAX_IDS else dropped).append(one)
    while len(kept) > MAX_STRAYS or ids_of(kept) > MAX_IDS:
        dropped.append(kept.pop(0))
    return kept, dropped


def ids_of(strays: Iterable[Stray]) -> int:
    return sum(len(one.ids) for one in strays)


def _begins(whole: Stray, part: Stray) -> bool:
    return whole.start == part.start and whole.ids[: len(part.ids)] == part.ids
