"""How transformers' parsers read a region of calls: JSON of several dialects, tags, lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvchat.formats.regexes import Regexes, compiled

Read = Callable[[str, Regexes], Any]

_HELD = re.compile(r"\x01(\d+)\x02")  # where a text of another spelling was
_BARE_KEY = compiled(r"(?<=[{,])(\w+):")
_GEMMA = {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}


def reader_of(name: Any, arguments: Any) -> Read:
    """Raises ValueError."""
    makers: dict[Any, Callable[[Mapping[str, Any]], Read]] = {
        "json": _json,
        "gemma4-tool-call": lambda _: _json(_GEMMA),
        "xml-inline": _tags,
        "kv-lines": _lines,
        **dict.fromkeys(("text", "int", "float", "bool"), _text),
    }
    if name not in makers or not isinstance(arguments, Mapping):
        raise ValueError(f"{name!r} reads no content")
    return makers[name](arguments)


def _text(arguments: Mapping[str, Any]) -> Read:
    return lambda text, _: text.strip() if arguments.get("strip", True) else text


def _json(arguments: Mapping[str, Any]) -> Read:
    try:
        pairs = [(str(begin), str(end)) for begin, end in arguments.get("string_delims", ())]
    except TypeError:
        raise ValueError("string_delims must be pairs of texts") from None
    quotes = [compiled(f"{re.escape(begin)}(.*?){re.escape(end)}") for begin, end in pairs]

    def read(text: str, regexes: Regexes) -> Any:
        said: list[str] = []
        work = text
        for quote in quotes:
            if _HELD.search(text):
                raise ValueError("has characters that stand for something else")
            parts, at = [], 0
            for match in regexes.all(quote, work):
                parts += [work[at : match.start()], f"\x01{len(said)}\x02"]
                said.append(match[1])
                at = match.end()
            work = "".join(parts) + work[at:]
        if arguments.get("unquoted_keys"):
            work = regexes.replace(_BARE_KEY, r'"\1":', work)
        try:
            return json.loads(_HELD.sub(lambda held: json.dumps(said[int(held[1])]), work) if said else work)
        except ValueError:
            if arguments.get("allow_non_json"):
                return text.strip()
            raise

    return read


def _tags(arguments: Mapping[str, Any]) -> Read:
    tag, inner = compiled(arguments.get("tag_pattern")), _inner(arguments)
    if not {"key", "value"} <= tag.groupindex.keys():
        raise ValueError("tag_pattern must have the groups key and value")

    def read(text: str, regexes: Regexes) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for match in regexes.all(tag, text):
            key, value = match["key"], inner(match["value"] or "", regexes)
            if arguments.get("merge_duplicates") and key in found:
                before = found[key]
                found[key] = [*before, value] if isinstance(before, list) else [before, value]
            else:
                found[key] = value
        return found

    return read


def _lines(arguments: Mapping[str, Any]) -> Read:
    end, colon, inner = arguments.get("line_sep", "\n"), arguments.get("kv_sep", ":"), _inner(arguments)
    if not (isinstance(end, str) and end and isinstance(colon, str) and colon):
        raise ValueError("line_sep and kv_sep must be texts")

    def read(text: str, regexes: Regexes) -> dict[str, Any]:
        pairs = (line.strip().split(colon, 1) for line in text.split(end) if colon in line.strip())
        return {key.strip(): inner(value.strip(), regexes) for key, value in pairs}

    return read


def _inner(arguments: Mapping[str, Any]) -> Read:
    """Of a value."""
    said = arguments.get("value_parser")
    if said is None:
        return lambda text, _: text
    if not isinstance(said, Mapping):
        raise ValueError("value_parser must be an object")
    return reader_of(said.get("name", "text"), said.get("args", {}))
