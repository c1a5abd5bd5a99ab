"""A tokenizer's own `response_schema`, as transformers had it before its `response_template`: a JSON schema whose nodes
say by regular expressions what of the text is theirs. It is for whole messages: nothing is told before the end.

A message that it cannot read, that has a call of no tool that there is, or that takes too long, is text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvchat.formats.content_parsers import Read, reader_of
from kvchat.formats.own_calls import MALFORMED, REASONING, Tools, calls_of
from kvchat.formats.query import Query, query_of
from kvchat.formats.regexes import Pattern, Regexes, compiled
from kvchat.formats.think import BEGIN
from kvchat.source import Parsing, PartialText

MOST_CHARS = 65_536  # of what is held back
_PATTERNS = ("x-regex", "x-regex-iterator", "x-regex-key-value")
_KNOWN = {*_PATTERNS, "x-regex-substitutions", "x-parser", "x-parser-args"}


class ResponseSchema:
    """Raises ValueError for what is none."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self._root = _Node(said)

    def parse(self, prompt: str, tools: Tools) -> Callable[[PartialText], Parsing[None]]:
        """A mark of reasoning at the end of the prompt is the message's."""
        begun = BEGIN if prompt.rstrip().endswith(BEGIN) else ""

        def parse(source: PartialText) -> Parsing[None]:
            text = ""
            while len(text) <= MOST_CHARS and (yield from source.wait()):
                text += source.take_rest()
            if len(text) > MOST_CHARS or not self._tell(begun + text, tools, source):
                source.say(text)
                yield from source.say_until(())

        return parse

    def _tell(self, text: str, tools: Tools, source: PartialText) -> bool:
        """False: it cannot be read."""
        try:
            found = self._root.read(text, Regexes())
            thought = next((found[name] for name in REASONING if found.get(name)), "")
            said, calls = found.get("content") or "", calls_of(found.get("tool_calls") or [], tools)
        except (TimeoutError, *MALFORMED):
            return False
        if not (isinstance(said, str) and isinstance(thought, str) and (said or thought or calls)):
            return False
        source.say(thought, aloud=False)
        source.say(said)
        for name, arguments in calls:
            source.begin_call(name)
            source.argue(arguments)
        return True


class _Node:
    """Raises ValueError for what is none."""

    def __init__(self, said: Any) -> None:
        if not isinstance(said, Mapping):
            raise ValueError("a schema must be an object")
        if unknown := {key for key in said if key.startswith("x-")} - _KNOWN:
            raise ValueError(f"has {', '.join(sorted(unknown))}, which is unknown here")
        self._said, self._kind = said, said.get("type")
        self._patterns: dict[str, Pattern] = {key: compiled(said[key]) for key in _PATTERNS if key in said}
        try:
            changes = [(compiled(pattern), str(by)) for pattern, by in said.get("x-regex-substitutions", ())]
        except TypeError:
            raise ValueError("x-regex-substitutions must be pairs") from None
        self._changes: list[tuple[Pattern, str]] = changes
        arguments = said.get("x-parser-args", {})
        self._parser: Read | None = reader_of(said["x-parser"], arguments) if "x-parser" in said else None
        self._query: Query | None = query_of(arguments["transform"]) if arguments.get("transform") else None
        self._properties = {name: _Node(one) for name, one in said.get("properties", {}).items()}
        more = said.get("additionalProperties", False)
        self._more = None if more is False else _Node({} if more is True else more)
        self._items = _Node(said["items"]) if "items" in said else None

    def read(self, content: Any, regexes: Regexes) -> Any:
        """Raises one of MALFORMED, or TimeoutError."""
        if "const" in self._said:
            return self._said["const"]
        if content is None or (content := self._found(content, regexes)) is None:
            return None
        if self._parser is not None:
            content = self._parser(_text(content), regexes)
        if self._query is not None:
            content = self._query(content)
        if self._kind == "object":
            return self._object(content, regexes)
        if self._kind == "array":
            if not isinstance(content, list) or self._items is None:
                raise ValueError("is no list")
            return [self._items.read(one, regexes) for one in content]
        return _text(content) if self._kind == "string" else content

    def _found(self, content: Any, regexes: Regexes) -> Any:
        """What its regular expressions leave of it; None: nothing."""
        for pattern, by in self._changes:
            content = regexes.replace(pattern, by, _text(content))
        for key, pattern in self._patterns.items():
            matches = regexes.all(pattern, _text(content))[: 1 if key == "x-regex" else None]
            if not matches:
                return None
            groups = [_groups(match) for match in matches]
            if key == "x-regex":
                content = groups[0]
            elif key == "x-regex-iterator":
                content = groups
            else:
                content = {one["key"]: one["value"] for one in groups}
        return content

    def _object(self, content: Any, regexes: Regexes) -> dict[str, Any]:
        if isinstance(content, str):  # each of its properties finds what is its own
            values = {name: node.read(content, regexes) for name, node in self._properties.items()}
            return {name: value for name, value in values.items() if value is not None}
        found = {}
        for name, node in self._properties.items():
            if "const" in node._said or name in content:
                found[name] = node.read(content.get(name), regexes)
            elif "default" in node._said:
                found[name] = node._said["default"]
        if self._more is not None:
            found |= {name: self._more.read(one, regexes) for name, one in content.items() if name not in found}
        return found


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise ValueError("is no text")
    return content


def _groups(match: Any) -> Any:
    """Those that have a name and were found, else the only one."""
    if match.groupdict():
        return {name: said for name, said in match.groupdict().items() if said is not None}
    (only,) = match.groups()
    return only
