"""The rooms of benchmarks: each benchmark runs by its short name, and code imports modules by their room's name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

import benchmarks

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"
ROOMS = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
FILES = [path for path in FOLDER.glob("*/*.py") if path.name != "__init__.py"]
NAMES = [path.stem for path in FILES if path.parent.name != "harness" and not path.stem.startswith("_")]
# From the ground up: a room imports lower ones alone.
FLOORS = [{"harness"}, {"engine", "gpu", "placement", "policies", "ingress", "reliability"}, {"tiers", "peers"}]


def rooms_named(path: Path) -> set[str]:
    """What follows `benchmarks.` in imports and in text that names a module to run."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "benchmarks":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= set(re.findall(r"^benchmarks\.(\w+)", node.module or ""))
        elif isinstance(node, ast.Import):
            found |= {one for alias in node.names for one in re.findall(r"^benchmarks\.(\w+)", alias.name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^benchmarks\.(\w+)", node.value))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_by_its_short_name(name: str) -> None:
    spec = find_spec(f"benchmarks.{name}")
    assert spec is not None
    assert Path(spec.origin or "").stem == name
    assert name not in ROOMS


def test_make_bench_runs_benchmarks_that_exist() -> None:
    listed = re.search(r"^BENCHMARKS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    assert set(listed[1].replace("\\\n", " ").split()) <= set(NAMES)


def test_a_name_is_in_one_room() -> None:
    assert [name for name, count in Counter(path.stem for path in FILES).items() if count > 1] == []


def test_code_says_the_room() -> None:
    """Else a module would be imported twice, under two names."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    for path in [*FILES, *tests]:
        assert rooms_named(path) <= ROOMS, path


def test_a_room_imports_lower_rooms_alone() -> None:
    floors = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert set(floors) == ROOMS
    for path in FILES:
        here = path.parent.name
        imports = {
            (node.module or "").split(".")[1]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks.")
        }
        assert all(floors[room] < floors[here] for room in imports - {here}), path


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_each_room_says_what_it_measures(room: str) -> None:
    assert ast.get_docstring(ast.parse((FOLDER / room / "__init__.py").read_text()))


def test_rooms_are_found_before_benchmarks() -> None:
    assert benchmarks.__path__[0] == str(FOLDER)
