"""JSON as models write it in calls, read as it comes: arguments are told before they are complete."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from kvchat.source import Parsing, PartialText

ARGUMENTS = ("arguments", "parameters")
_BRACKET = re.compile(r'["{}\[\]]')
_ENDS = {quote: re.compile(rf"[{quote}\\]") for quote in ('"', "'")}
_SCALAR_END = re.compile(r"[,\]}\s]")


def value(source: PartialText, tell: Callable[[str], None]) -> Parsing[bool]:
    """Step over a value and tell its text, as it comes. Whether it has an end."""
    first = yield from source.peek()
    if first == '"':
        return (yield from string(source, tell))
    if first not in ("{", "["):
        yield from source.tell_until(_SCALAR_END, tell)
        return first not in ("", ",", "]", "}")
    depth = 0
    while True:
        if not (yield from source.tell_until(_BRACKET, tell)):
            return False
        one = yield from source.peek()
        if one == '"':
            if not (yield from string(source, tell)):
                return False
            continue
        yield from source.take(one)
        tell(one)
        depth += 1 if one in "{[" else -1
        if not depth:
            return True


def string(source: PartialText, tell: Callable[[str], None], quote: str = '"') -> Parsing[bool]:
    """Of one line, with its quotes, as JSON and Python have them. Whether it has an end."""
    yield from source.take(quote)
    tell(quote)
    while True:
        if not (yield from source.tell_until(_ENDS[quote], tell)):
            return False
        if (yield from source.take(quote)):
            tell(quote)
            return True
        pair = yield from source.peek(2)
        if len(pair) < 2:
            return False
        yield from source.take(pair)
        tell(pair)


def call(source: PartialText) -> Parsing[bool]:
    """An object with `name` and `arguments`, or `parameters`, in any order. False: it is none, and nothing was told.
    Once a call is told of, its arguments are whatever the model writes in their place."""
    name, early = "", ""
    began = False
    yield from source.skip_blank()
    if not (yield from source.take("{")):
        return False
    while True:
        yield from source.skip_blank()
        if (yield from source.take("}")):
            break
        key = yield from text_of(source)
        yield from source.skip_blank()
        if key is None or not (yield from source.take(":")):
            return began
        yield from source.skip_blank()
        if key == "name" and not began:
            name = (yield from text_of(source)) or ""
            if name not in source.tools:
                return False
        elif key in ARGUMENTS and name and not began:
            if (yield from source.peek()) != "{":
                return False
            source.keep()
            source.begin_call(name)
            began = True
            if not (yield from value(source, source.argue)):
                return True
        else:
            told: list[str] = []
            if not (yield from value(source, told.append)):
                return began
            early = "".join(told) if key in ARGUMENTS else early
        yield from source.skip_blank()
        yield from source.take(",")
    if not name:
        return False
    if not began:
        source.keep()
        source.begin_call(name)
        source.argue(early if early.startswith("{") else "{}")
    return True


def text_of(source: PartialText) -> Parsing[str | None]:
    """A string; None if it is none."""
    if (yield from source.peek()) != '"':
        return None
    told: list[str] = []
    if not (yield from string(source, told.append)):
        return None
    try:
        return str(json.loads("".join(told)))
    except ValueError:
        return None
