"""The part of JMESPath that `response_schema`s use to turn what they have parsed into calls. Pure.

@    name    'text'    {name: query, ...}    [query, ...]    query.query    [*].query
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Query = Callable[[Any], Any]

_WORD = re.compile(r"\s*(?:(\[\*\]|[@.,:{}\[\]])|'([^']*)'|\"?([A-Za-z_]\w*)\"?)\s*")


def query_of(text: Any) -> Query:
    """Raises ValueError for more than this part."""
    parser = _Parser(text if isinstance(text, str) else "")
    query = parser.query()
    if parser.words:
        raise ValueError(f"{text!r} says more than is known here")
    return query


class _Parser:
    def __init__(self, text: str) -> None:
        self.words: list[tuple[str, str]] = []  # kind and text; a sign is its own kind
        at = 0
        while at < len(text):
            if (found := _WORD.match(text, at)) is None:
                raise ValueError(f"{text!r} says more than is known here")
            sign, literal, name = found.groups()
            self.words.append((sign, sign) if sign else ("text", literal) if name is None else ("name", name))
            at = found.end()

    def query(self) -> Query:
        query = self._each(lambda value: value) if self._takes("[*]") else self._one()
        while self.words and self.words[0][0] in (".", "[*]"):
            query = _then(query, self._one()) if self._takes(".") else self._each(query)
        return query

    def _each(self, of: Query) -> Query:
        """What follows is for each of a list."""
        self._takes("[*]")
        inner = self.query() if self._takes(".") else lambda value: value

        def each(value: Any) -> Any:
            found = of(value)
            return [one for one in map(inner, found) if one is not None] if isinstance(found, list) else None

        return each

    def _one(self) -> Query:
        kind, text = self.words.pop(0) if self.words else ("", "")
        if kind == "@":
            return lambda value: value
        if kind == "text":
            return lambda value: text
        if kind == "name":
            return lambda value: value.get(text) if isinstance(value, dict) else None
        if kind == "{":
            names: list[str] = []
            queries: list[Query] = []
            while not names or self._takes(","):
                names.append(self._name())
                queries.append(self.query())
            self._must("}")
            return lambda value: dict(zip(names, (query(value) for query in queries), strict=True))
        if kind == "[":
            queries = [self.query()]
            while self._takes(","):
                queries.append(self.query())
            self._must("]")
            return lambda value: [query(value) for query in queries]
        raise ValueError(f"{text!r} is not known here")

    def _name(self) -> str:
        kind, text = self.words.pop(0) if self.words else ("", "")
        if kind != "name":
            raise ValueError(f"{text!r} is no name")
        self._must(":")
        return text

    def _takes(self, sign: str) -> bool:
        if self.words and self.words[0][0] == sign:
            self.words.pop(0)
            return True
        return False

    def _must(self, sign: str) -> None:
        if not self._takes(sign):
            raise ValueError(f"{sign} is missing")


def _then(first: Query, second: Query) -> Query:
    def both(value: Any) -> Any:
        found = first(value)
        return None if found is None else second(found)

    return both
