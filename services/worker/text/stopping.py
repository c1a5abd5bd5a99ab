"""When generated text ends early: stop strings, found across token borders. Pure.

Stop ids and lengths are plain comparisons and live with the engine; text is what needs care, because a stop string may
begin in one token and end in a later one, and nothing of it may have been sent by then.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """A set of strings any of which ends the text before it. Empty strings are ignored."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._strings = tuple(dict.fromkeys(s for s in strings if s))
        self._longest = max(map(len, self._strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings)

    @property
    def longest(self) -> int:
        """Characters of the longest one."""
        return self._longest

    def find(self, text: str) -> int:
        """Where the earliest stop string in `text` begins, -1 if there is none."""
        found = [at for at in (text.find(s) for s in self._strings) if at >= 0]
        return min(found, default=-1)

    def held(self, text: str) -> int:
        """Length of the longest end of `text` that more text could turn into a stop string.

        Assumes that `text` contains no whole stop string.
        """
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(s.startswith(end) for s in self._strings):
                return length
        return 0
