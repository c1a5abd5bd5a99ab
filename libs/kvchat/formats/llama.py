"""Llama 3.x: the whole message is `{"name": "f", "parameters": {...}}`; more calls follow a `;`."""

from __future__ import annotations

from kvchat.json_calls import call
from kvchat.source import Parsing, PartialText

TAG = "<|python_tag|>"


def parse(source: PartialText) -> Parsing[None]:
    source.mark()
    yield from source.skip_blank()
    yield from source.take(TAG)
    while (yield from call(source)):
        yield from source.skip_blank()
        source.mark()
        if not (yield from source.take(";")):
            break
    source.take_back()
    yield from source.say_until(())
