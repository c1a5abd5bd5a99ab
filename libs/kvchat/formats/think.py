"""Reasoning between marks, before the message."""

from __future__ import annotations

from collections.abc import Callable

from kvchat.source import Parsing, PartialText

BEGIN, END = "<think>", "</think>"


def thinking(then: Callable[[PartialText], Parsing[None]], *, begun: bool) -> Callable[[PartialText], Parsing[None]]:
    """`begun`: the prompt has the mark where it begins. A model that is cut has thought all the time."""

    def parse(source: PartialText) -> Parsing[None]:
        source.mark()
        yield from source.skip_blank()
        if begun or (yield from source.take(BEGIN)):
            source.keep()
            yield from source.take(BEGIN)  # again, as some do
            yield from source.say_until((END,), aloud=False)
        source.take_back()
        yield from then(source)

    return parse


def plain(source: PartialText) -> Parsing[None]:
    yield from source.say_until(())
