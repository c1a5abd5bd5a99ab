"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once for each call."""

from __future__ import annotations

from kvchat.json_calls import call
from kvchat.source import Parsing, PartialText

BEGIN, END = "<tool_call>", "</tool_call>"


def parse(source: PartialText) -> Parsing[None]:
    while (yield from source.say_until((BEGIN,))):
        source.mark(BEGIN)
        if (yield from call(source)):
            yield from source.skip_blank()
            yield from source.take(END)
        else:
            source.take_back()
