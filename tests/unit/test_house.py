"""What the house promises of its files: one name for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [path for top in ("services", "libs") for path in (ROOT / top).rglob("*.py")]


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_each_room_says_what_it_owns() -> None:
    for path in FILES:
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), path


def test_docstrings_name_their_subject() -> None:
    """A request, a worker, the caller: not "whoever"."""
    assert [str(path) for path in FILES if "whoever" in path.read_text().lower()] == []
