"""Regular expressions that a model's tokenizer brings, on text that callers have a hand in: some take exponential time,
so they share a message's time. Pure but for the processor's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import regex

T = TypeVar("T")

MOST_S = 0.5  # of a processor, at once; other threads of the process count, as `regex` has it
PIECE_S = 0.005  # that each further piece of the message brings
Pattern = Any  # of `regex`, which has no types


def compiled(pattern: Any) -> Pattern:
    """Raises ValueError."""
    if not isinstance(pattern, str):
        raise ValueError(f"{pattern!r} is no regular expression")
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ValueError(f"{pattern[:80]!r} is no regular expression: {error}") from None


class Regexes:
    """Of one message. All raise TimeoutError when its time is used up, and ValueError."""

    def __init__(self) -> None:
        self._left_s = MOST_S

    def more(self) -> None:
        """A piece has come."""
        self._left_s = min(self._left_s + PIECE_S, MOST_S)

    def search(self, pattern: Pattern, text: str, *, partial: bool = False) -> Any:
        """With `partial` also what may yet become a match, at the end of the text."""
        return self._timed(lambda left_s: pattern.search(text, partial=partial, timeout=left_s))

    def all(self, pattern: Pattern, text: str) -> list[Any]:
        found = []

        def find(left_s: float) -> None:
            until = time.process_time() + left_s  # what `regex` bounds is each of them
            for match in pattern.finditer(text, timeout=left_s):
                found.append(match)
                if time.process_time() > until:
                    raise TimeoutError

        self._timed(find)
        return found

    def replace(self, pattern: Pattern, by: str, text: str) -> str:
        return str(self._timed(lambda left_s: pattern.sub(by, text, timeout=left_s)))

    def _timed(self, do: Callable[[float], T]) -> T:
        if self._left_s <= 0:
            raise TimeoutError
        began = time.process_time()
        try:
            return do(self._left_s)
        except (regex.error, IndexError) as error:  # a replacement with a group that its pattern has not
            raise ValueError(str(error)) from None
        finally:
            self._left_s -= time.process_time() - began
