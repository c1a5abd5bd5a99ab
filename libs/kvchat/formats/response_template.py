"""A tokenizer's own `response_template`, as transformers has it: regions between anchors, each a field of the message.

    start_anchor    where the answer begins in the prompt: what the prompt has of it already counts
    open, close     of a region: texts, or regular expressions whose named groups go into its `transform`
    content         how a region is read: as text, or as the arguments of calls

Text is told as it comes, calls when their region ends. A region of calls that has none of a tool that there is, or a
message that takes too long, is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvchat.formats.content_parsers import Read, reader_of
from kvchat.formats.own_calls import MALFORMED, REASONING, Tools, calls_of
from kvchat.formats.regexes import Pattern, Regexes, compiled
from kvchat.source import Parsing, PartialText

_PLACE = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_TOP = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Anchor:
    """`grows`: a match at the end of the text may become longer."""

    pattern: Pattern
    grows: bool


@dataclass(frozen=True, slots=True)
class _Region:
    name: str
    open: _Anchor | None
    close: _Anchor | None
    read: Read
    strips: bool
    join: str
    transform: Any
    each: bool

    @property
    def thinks(self) -> bool:
        return self.name in REASONING

    def calls(self, body: str, groups: Mapping[str, str], tools: Tools, regexes: Regexes) -> list[tuple[str, str]]:
        """Raises one of MALFORMED, or TimeoutError."""
        value = self.read(body, regexes)
        if self.each:
            value = [_filled(self.transform, {**groups, **one}) for one in value]
        elif self.transform is not None:
            value = _filled(self.transform, {**groups, "content": value})
        return calls_of(value, tools)


class ResponseTemplate:
    """Raises ValueError for what is none."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        _check_keys(said, _TOP)
        begin, fields = _anchor(said, "start_anchor"), said.get("fields")
        if said.get("version", 1) != 1 or begin is None or not isinstance(fields, dict):
            raise ValueError("must have a start_anchor and fields, and version 1 if any")
        self.begin = begin.pattern
        regions = [_region(name, field) for name, field in fields.items()]
        implicit = [region for region in regions if region.open is None]
        if len(implicit) > 1:
            raise ValueError("one field at most may have no anchor where it opens")
        self.implicit = implicit[0] if implicit else None
        self._openings = [(region, region.open) for region in regions if region.open is not None]

    def parse(self, prompt: str, tools: Tools) -> Callable[[PartialText], Parsing[None]]:
        return lambda source: _Reading(self, source, tools).read(prompt)

    def awaited(self, region: _Region | None) -> list[tuple[_Region | None, _Anchor]]:
        """The anchors that may come next in a region, with what each opens; None: it closes this one."""
        ends: list[tuple[_Region | None, _Anchor]] = []
        if region is not None and region.close is not None:
            ends = [(None, region.close)]
        return [*self._openings, *ends] if region is self.implicit else ends


class _Reading:
    """Of one message."""

    def __init__(self, template: ResponseTemplate, source: PartialText, tools: Tools) -> None:
        self._template, self._source, self._tools = template, source, tools
        self._regexes = Regexes()
        self._text = ""  # not read yet
        self._muted = 0  # characters of it that are the prompt's
        self._region: _Region | None = template.implicit
        self._groups: dict[str, str] = {}  # of the anchor that opened it
        self._anchor = ""  # that one's text
        self._body = ""  # of a region of calls
        self._stray = ""  # of no region, before the first one
        self._blank = ""  # of the region, held back
        self._told: set[str] = set()  # the regions that had text
        self._leads = True  # the present one had none yet
        self._has_regions = False

    def read(self, prompt: str) -> Parsing[None]:
        source, ended = self._source, False
        try:
            begins = self._regexes.all(self._template.begin, prompt)
            self._text = prompt[begins[-1].end() :] if begins else ""
            self._muted = len(self._text)
            while True:
                self._text += source.take_rest()
                self._go_on(ended=ended)
                if ended:
                    return
                source.is_thinking = self._region is not None and self._region.thinks
                ended = not (yield from source.wait())
                self._regexes.more()
        except TimeoutError:
            source.say(self._stray + self._blank + self._anchor + self._body + self._text[self._muted :])
        source.is_thinking = False
        yield from source.say_until(())

    def _go_on(self, *, ended: bool) -> None:
        stands = 0
        while True:
            opens, match, sure = self._next(ended=ended)
            if match is None:
                self._tell(self._taken(sure))
                break
            stands = 0 if match.end() else stands + 1
            if stands > 2:  # anchors that match nothing at all
                raise TimeoutError
            self._tell(self._taken(match.start()))
            anchor = self._taken(match.end() - match.start())
            if opens is None:
                self._end(anchor)
            else:
                self._end("")
                self._region, self._anchor, self._has_regions, self._stray = opens, anchor, True, ""
                self._groups = {name: said for name, said in match.groupdict().items() if said is not None}
        if ended:
            self._end("")
            self._source.say(self._stray)

    def _next(self, *, ended: bool) -> tuple[_Region | None, Any, int]:
        """What the next anchor opens, its match, and how much of the text is before all that may yet be one."""
        best: tuple[Any, ...] = ()
        end = sure = len(self._text)
        for opens, anchor in self._template.awaited(self._region):
            match = self._regexes.search(anchor.pattern, self._text, partial=not ended)
            if match is None or match.start() == end:
                continue
            if not ended and (match.partial or (match.end() == end and anchor.grows)):
                sure = min(sure, match.start())
                continue
            key = match.start(), -match.end(), opens is None, opens.name if opens else ""
            if not best or key < best[0]:
                best = key, opens, match
        if not best or best[2].start() >= sure:
            return None, None, sure
        return best[1], best[2], sure

    def _taken(self, count: int) -> str:
        """So much of the text, without what is the prompt's."""
        taken, self._text = self._text[:count], self._text[count:]
        muted = min(self._muted, count)
        self._muted -= muted
        return taken[muted:]

    def _tell(self, text: str) -> None:
        region = self._region
        if region is None:
            self._stray += "" if self._has_regions else text
        elif region.name == "tool_calls":
            self._body += text
        elif region.thinks or region.name == "content":
            text = self._blank + text
            if region.strips:
                text = text.lstrip() if self._leads else text
                told = text.rstrip()
                self._blank, text = text[len(told) :], told
            if text and self._leads and region.name in self._told:
                text = region.join + text
            if text:
                self._leads = False
                self._told.add(region.name)
                self._source.say(text, aloud=not region.thinks)

    def _end(self, anchor: str) -> None:
        """Of the region, by an anchor, if any."""
        region, body = self._region, self._body
        if region is not None and region.name == "tool_calls" and (body or self._anchor):
            try:
                calls = region.calls(body, self._groups, self._tools, self._regexes)
            except MALFORMED:
                self._source.say(self._anchor + body + anchor)
                calls = []
            for name, arguments in calls:
                self._source.begin_call(name)
                self._source.argue(arguments)
        self._region, self._leads = self._template.implicit, True
        self._groups, self._anchor, self._body, self._blank = {}, "", "", ""


def _region(name: str, said: Any) -> _Region:
    if not isinstance(said, dict):
        raise ValueError(f"{name} must be an object")
    _check_keys(said, _FIELD)
    arguments, transform = said.get("content_args", {}), said.get("transform")
    read = reader_of(said.get("content", "text"), arguments)
    opening, closing = _anchor(said, "open"), _anchor(said, "close")
    strips = bool(arguments.get("strip", True))
    return _Region(
        name, opening, closing, read, strips, str(said.get("join") or ""), transform, bool(said.get("transform_each"))
    )


def _anchor(said: Mapping[str, Any], name: str) -> _Anchor | None:
    text, pattern = said.get(name), said.get(f"{name}_pattern")
    if text is not None and pattern is not None:
        raise ValueError(f"has both {name} and {name}_pattern")
    if pattern is not None:
        return _Anchor(compiled(pattern), True)
    if text is None:
        return None
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise ValueError(f"{name} must be a text, or texts")
    longest_first = sorted(set(texts), key=len, reverse=True)
    grows = any(one != other and one.startswith(other) for one in texts for other in texts)
    return _Anchor(compiled("|".join(map(re.escape, longest_first))), grows)


def _check_keys(said: Mapping[str, Any], known: set[str]) -> None:
    if unknown := said.keys() - known:
        raise ValueError(f"has {', '.join(sorted(unknown))}, which is unknown here")


def _filled(transform: Any, values: Mapping[str, Any]) -> Any:
    """Raises one of MALFORMED."""
    if isinstance(transform, dict):
        return {key: _filled(one, values) for key, one in transform.items()}
    if isinstance(transform, list):
        return [_filled(one, values) for one in transform]
    place = _PLACE.fullmatch(transform) if isinstance(transform, str) else None
    if place is None:
        return transform
    value: Any = values
    for key in place[1].split("."):
        value = value[key]
    return value
