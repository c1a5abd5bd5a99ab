"""What the house promises of its files: one name for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
MIN_LINES = 30  # of a file that one other uses
PLUG_INS = {"formats", "eviction", "policies"}  # rooms that have a file for each kind
MAX_PARAMETERS = 8
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


def test_no_file_is_too_long() -> None:
    assert {str(path): lines for path in FILES if (lines := len(path.read_text().splitlines())) > MAX_LINES} == {}


def test_no_constructor_takes_too_many_parameters() -> None:
    """What belongs together is one dataclass. Those that are values, and compare as such, may have more fields."""
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and (count := _parameters(node)) > MAX_PARAMETERS:
                found[f"{path.relative_to(ROOT)}: {node.name}"] = count
    assert found == {}


def _parameters(node: ast.ClassDef) -> int:
    if any(ast.unparse(one).startswith("dataclass(eq=False") for one in node.decorator_list):
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and one.value is None]
        return len([one for one in fields if ast.unparse(one.annotation) != "KW_ONLY"])
    made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    return max((len(one.args.args) + len(one.args.kwonlyargs) - 1 for one in made), default=0)


def test_a_setting_crosses_at_most_two_constructors() -> None:
    """Its class takes the settings, or one object makes another. A third in between only hands it on."""
    for settings in (ROOT / "services").glob("*/settings.py"):
        names = {name for node in _classes(settings) for name in _takes(node)}
        made = {
            node.name: node for path in settings.parent.rglob("*.py") if path != settings for node in _classes(path)
        }
        hands_on = {
            (name, owner, ast.unparse(call.func))
            for owner, node in made.items()
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and ast.unparse(call.func) in made
            for value in [*call.args, *(keyword.value for keyword in call.keywords)]
            if (name := ast.unparse(value).removeprefix("self.").lstrip("_")) in names & _takes(node)
        }
        between = {(name, owner) for name, owner, _ in hands_on} & {(name, taker) for name, _, taker in hands_on}
        assert between == set()


def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


def _takes(node: ast.ClassDef) -> set[str]:
    """The names of a class's fields and of its constructor's parameters."""
    taken = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            taken |= {parameter.arg for parameter in [*one.args.args, *one.args.kwonlyargs]}
    return taken - {"self"}


def test_no_property_returns_what_an_attribute_would_be() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list):
                last = node.body[-1]
                if isinstance(last, ast.Return) and last.value is not None:
                    owner, _, name = ast.unparse(last.value).partition(".")
                    if owner == "self" and name.startswith("_") and name.isidentifier():
                        found.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert found == ["libs/kvproto/streams/stream.py: error"]  # which its users read, and only read


def test_a_short_file_has_several_users() -> None:
    """One that a single file uses is a part of that file. Entry points are named elsewhere."""
    users = defaultdict(set)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                users[node.module].add(path)
                for name in node.names:
                    users[f"{node.module}.{name.name}"].add(path)
    lonely = []
    for path in FILES:
        if (
            path.name.startswith("__")
            or path.parent.name in PLUG_INS
            or len(path.read_text().splitlines()) >= MIN_LINES
        ):
            continue
        top, *rest = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(["kvfleet", *rest] if top == "services" else rest)
        if len(users[module]) == 1:
            lonely.append(module)
    assert lonely == []
