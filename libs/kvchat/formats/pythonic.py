"""Pythonic, as Llama 4 and Llama 3.2 write it: the whole message is `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from typing import Any

from kvchat.json_calls import string
from kvchat.source import Parsing, PartialText

BEGIN, END = "<|python_start|>", "<|python_end|>"
_NAME_END = re.compile(r"[^\w.]")
_STOP = re.compile(r"""["'(){}\[\],]""")


def parse(source: PartialText) -> Parsing[None]:
    source.mark()
    yield from source.skip_blank()
    yield from source.take(BEGIN)
    if (yield from source.take("[")):
        while (yield from _call(source)):
            yield from source.skip_blank()
            source.mark()
            if not (yield from source.take(",")):
                yield from source.take("]")
                yield from source.take(END)
                source.keep()
                break
    source.take_back()
    yield from source.say_until(())


def _call(source: PartialText) -> Parsing[bool]:
    """False: it is none, and nothing was told."""
    yield from source.skip_blank()
    name = yield from _name(source)
    if name not in source.tools or not (yield from source.take("(")):
        return False
    began = False
    while True:
        yield from source.skip_blank()
        if (yield from source.take(")")):
            break
        key = yield from _name(source)
        yield from source.skip_blank()
        said = (yield from _value(source)) if key and (yield from source.take("=")) else ""
        if (text := _json_of(said.strip())) is None:
            if began:
                source.argue(said)
            return began
        if not began:
            source.keep()
            source.begin_call(name)
        source.argue(("{" if not began else ", ") + f"{json.dumps(key)}: {text}")
        began = True
        yield from source.take(",")
    if not began:
        source.keep()
        source.begin_call(name)
    source.argue("}" if began else "{}")
    return True


def _name(source: PartialText) -> Parsing[str]:
    told: list[str] = []
    yield from source.tell_until(_NAME_END, told.append)
    return "".join(told)


def _value(source: PartialText) -> Parsing[str]:
    """A literal's text, up to the comma or bracket behind it; cut at the end of the text."""
    told: list[str] = []
    depth = 0
    while (yield from source.tell_until(_STOP, told.append)):
        one = yield from source.peek()
        if one in "\"'":
            yield from string(source, told.append, one)
            continue
        if not depth and one in "),]}":
            break
        depth += 1 if one in "([{" else -1 if one in ")]}" else 0
        yield from source.take(one)
        told.append(one)
    return "".join(told)


def _json_of(said: str) -> str | None:
    """Of a literal of Python's, or of JSON's; None if it is neither."""
    for read in (ast.literal_eval, json.loads):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return json.dumps(_plain(read(said)), ensure_ascii=False)
    return None


def _plain(said: Any) -> Any:
    """As JSON has it. Raises TypeError."""
    if isinstance(said, dict):
        return {str(key): _plain(one) for key, one in said.items()}
    if isinstance(said, list | tuple):
        return [_plain(one) for one in said]
    if said is None or isinstance(said, str | bool | int | float):
        return said
    raise TypeError(type(said).__name__)
