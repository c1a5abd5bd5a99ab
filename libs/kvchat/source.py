"""Text that comes in pieces, and parsers that wait for it: generators that yield whenever they need more.

A parser is straight code over a `PartialText`; a `MessageReader` runs it as far as the text goes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

from kvchat.parts import ArgumentsGrew, CallBegan, Part, Said, Thought

T = TypeVar("T")
Parsing = Generator[None, None, T]
_NO_BLANK = re.compile(r"\S")


class PartialText:
    """`tools` are the names that calls may have."""

    def __init__(self, tools: Collection[str] = ()) -> None:
        self.tools = tools
        self.calls = 0
        self.is_thinking = False
        self.parts: list[Part] = []
        self._text = ""
        self._at = 0
        self._ended = False
        self._mark: int | None = None
        self._trims = False  # white space that comes next is nobody's
        self._blank = 0  # of it, before the marker that was found

    # What comes.

    def push(self, text: str) -> None:
        cut = self._at if self._mark is None else self._mark
        self._text = self._text[cut:] + text
        self._at -= cut
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        self._ended = True

    def wait(self) -> Parsing[bool]:
        """For more. False: there will be none."""
        if self._ended:
            return False
        yield
        return True

    def peek(self, count: int = 1) -> Parsing[str]:
        """The next characters; fewer at the end."""
        while len(self._text) - self._at < count and (yield from self.wait()):
            pass
        return self._text[self._at : self._at + count]

    def take(self, literal: str) -> Parsing[bool]:
        """Step over it, if it comes next."""
        found = (yield from self.peek(len(literal))) == literal
        self._at += len(literal) if found else 0
        return found

    def tell_until(self, stop: re.Pattern[str], tell: Callable[[str], None]) -> Parsing[bool]:
        """Step over what comes before a match, telling it as it comes. Whether there is one."""
        while True:
            found = stop.search(self._text, self._at)
            here = found.start() if found else len(self._text)
            if here > self._at:
                tell(self._text[self._at : here])
                self._at = here
            if found or not (yield from self.wait()):
                return found is not None

    def skip_blank(self) -> Parsing[None]:
        yield from self.tell_until(_NO_BLANK, lambda _: None)

    def take_until(self, marker: str, most: int = 256) -> Parsing[str | None]:
        """What comes before a marker, which is stepped over; None, and nothing is taken, if that is too much or the end
        comes first."""
        while (found := self._text.find(marker, self._at, self._at + most + len(marker))) < 0:
            if len(self._text) - self._at >= most + len(marker) or not (yield from self.wait()):
                return None
        taken = self._text[self._at : found]
        self._at = found + len(marker)
        return taken

    def take_rest(self) -> str:
        """All that is here."""
        taken, self._at = self._text[self._at :], len(self._text)
        return taken

    # What is told.

    def say(self, text: str, *, aloud: bool = True) -> None:
        """One after the other they are one part."""
        kind = Said if aloud else Thought
        if not text:
            return
        if self.parts and isinstance(last := self.parts[-1], kind):
            self.parts[-1] = kind(last.text + text)
        else:
            self.parts.append(kind(text))

    def begin_call(self, name: str) -> None:
        self.parts.append(CallBegan(self.calls, name))
        self.calls += 1
        self._trims = True

    def argue(self, text: str) -> None:
        if text and isinstance(last := self.parts[-1] if self.parts else None, ArgumentsGrew):
            self.parts[-1] = ArgumentsGrew(last.index, last.text + text)
        elif text:
            self.parts.append(ArgumentsGrew(self.calls - 1, text))

    def say_until(self, markers: Sequence[str], *, aloud: bool = True) -> Parsing[str]:
        """Tell the text before the first of them, as it comes, and step over that; "" at the end of the text. White
        space around a call, or where reasoning begins and ends, is nobody's."""
        self.is_thinking = not aloud
        self._trims = self._trims or not aloud
        while True:
            before, marker = self._before(markers)
            spoken = before.rstrip()
            told = spoken.lstrip() if self._trims else spoken
            self.say(told, aloud=aloud)
            self._trims = self._trims and not told
            self._at += len(spoken)
            self._blank = len(before) - len(spoken)
            if marker:
                self._at += self._blank + len(marker)
                self._trims = self._trims or not aloud
                self.is_thinking = False
                return marker
            if not (yield from self.wait()):
                if aloud and not self.calls and not self._trims:
                    self.say(self._text[self._at :])
                self._at = len(self._text)
                return ""

    def argue_until(self, markers: Sequence[str]) -> Parsing[None]:
        """Tell the text before the first of them as arguments, and step over that."""
        while True:
            before, marker = self._before(markers)
            self.argue(before)
            self._at += len(before) + len(marker)
            if marker or not (yield from self.wait()):
                return

    def _before(self, markers: Sequence[str]) -> tuple[str, str]:
        """The text before the first of them, and that one; "" where none is here, and of the text what begins none."""
        text = self._text[self._at :]
        here, marker = min(((at, one) for one in markers if (at := text.find(one)) >= 0), default=(len(text), ""))
        if not marker and not self._ended:
            here -= unsure(text, markers)
        return text[:here], marker

    # Going back.

    def mark(self, before: str = "") -> None:
        """What comes from here on, and the marker `before`, which `say_until` found, may turn out to be text."""
        self._mark = self._at - len(before) - (self._blank if before else 0)

    def keep(self) -> None:
        self._mark = None

    def take_back(self) -> None:
        """It was text, if it is marked."""
        if self._mark is not None:
            self.say(self._text[self._mark : self._at])
            self._mark = None


def unsure(text: str, markers: Sequence[str]) -> int:
    """How many of the last characters may begin a marker."""
    longest = max((len(one) for one in markers), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(one.startswith(text[-count:]) for one in markers):
            return count
    return 0


class MessageReader:
    """Of one message. `thoughts`: how many of the pieces that it was fed were reasoning."""

    def __init__(self, parse: Callable[[PartialText], Parsing[None]], tools: Collection[str] = ()) -> None:
        self._source = PartialText(tools)
        self._parsing = parse(self._source)
        self.thoughts = 0

    @property
    def calls(self) -> int:
        return self._source.calls

    def feed(self, text: str) -> list[Part]:
        self._source.push(text)
        parts = self._go_on()
        self.thoughts += self._source.is_thinking or any(type(part) is Thought for part in parts)
        return parts

    def end(self) -> list[Part]:
        """The rest."""
        self._source.end()
        return self._go_on()

    def _go_on(self) -> list[Part]:
        next(self._parsing, None)
        parts, self._source.parts = self._source.parts, []
        return parts
