"""Mistral: `[TOOL_CALLS]` before a list `[{"name": "f", "arguments": {...}}, ...]`, or before each `f[ARGS]{...}`."""

from __future__ import annotations

import re

from kvchat.json_calls import call, value
from kvchat.source import Parsing, PartialText

BEGIN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME_END = re.compile(r"[\[{\s]")


def parse(source: PartialText) -> Parsing[None]:
    while (yield from source.say_until((BEGIN,))):
        source.mark(BEGIN)
        yield from source.skip_blank()
        if (yield from source.take("[")):
            while (yield from call(source)):
                yield from source.skip_blank()
                source.mark()
                if not (yield from source.take(",")):
                    yield from source.take("]")
                    source.keep()
                    break
        else:
            yield from _named(source)
        source.take_back()


def _named(source: PartialText) -> Parsing[None]:
    told: list[str] = []
    yield from source.tell_until(_NAME_END, told.append)
    if (name := "".join(told)) not in source.tools:
        return
    if (yield from source.take(ID)) and (yield from source.take_until(ARGS)) is None:
        return
    yield from source.take(ARGS)
    yield from source.skip_blank()
    if (yield from source.peek()) == "{":
        source.keep()
        source.begin_call(name)
        yield from value(source, source.argue)
