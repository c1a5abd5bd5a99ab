"""What pages promise without being run: length, links, tables, and that generated ones are what the code says."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts import make_reference
from tests.docs.pages import ROOT, anchors, links, pages, text_of

MOST_WORDS = 900  # of the README: more belongs into docs/
FIGURE = re.compile(r"^\| `python -m benchmarks\.(\w+)[^`]*` \| (.+) \| (.+) \|$", re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").split()) <= MOST_WORDS


def test_the_readme_has_the_two_commands() -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"\bmake (\w[\w-]*)", text_of("README.md")))
    assert {"run", "test", "docs"} <= named <= set(targets)


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    lost = []
    for target, anchor in links(page):
        path = (ROOT / page).parent / target if target else ROOT / page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            lost.append(f"{target}#{anchor}" if anchor else target)
    assert lost == []


def test_every_figure_is_a_command_with_a_floor() -> None:
    rows = FIGURE.findall(text_of("docs/figures.md"))
    assert len(rows) >= 40
    assert len({name for name, _, _ in rows}) == len(rows), "one row each"
    for name, figure, floor in rows:
        assert find_spec(f"benchmarks.{name}") is not None, name
        assert re.search(r"\d", figure), name
        assert re.search(r"\d", floor), name


def test_a_floor_that_is_not_held_is_among_the_figures() -> None:
    told = text_of("docs/limits.md").partition("## Floors that are not held")[2]
    named = re.findall(r"^\| `(\w+)` \|", told, re.MULTILINE)
    rows = {name: f"{figure} {floor}" for name, figure, floor in FIGURE.findall(text_of("docs/figures.md"))}
    assert named
    assert set(named) <= rows.keys()
    assert {name for name, row in rows.items() if "not held" in row or "not in every run" in row} <= set(named)


def test_the_reference_is_what_the_code_says() -> None:
    assert sorted(make_reference.stale()) == [], "python -m scripts.make_reference writes these pages"


def test_the_reference_has_no_other_pages() -> None:
    assert {path.name for path in make_reference.FOLDER.iterdir()} == make_reference.PAGES.keys()


def test_pictures_ask_nobody_for_anything() -> None:
    for path in sorted(Path(ROOT / "docs").rglob("*.svg")):
        asked = re.findall(r"(?:href|src)\s*=\s*[\"']\w+://[^\"']+|url\([\"']?\w+://[^)]+", path.read_text())
        assert asked == [], path.name
