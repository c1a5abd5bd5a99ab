"""The page as it lies in the package: complete, its own files alone, and nothing that could make markup of text."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from services.ingress.dashboard.page import FILES, INDEX, POLICY
from services.ingress.openapi import OPERATIONS

ROOT = Path(__file__).parents[3]
FOLDER = resources.files("services.ingress.dashboard")


def text(name: str) -> str:
    return FOLDER.joinpath(name).read_text(encoding="utf-8")


def test_the_files_are_in_the_package_and_the_package_is_what_is_built() -> None:
    beside = {one.name for one in FOLDER.iterdir() if one.is_file() and not one.name.endswith(".py")}
    assert beside == set(FILES)
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert built == {"packages": ["services", "libs/kvproto", "libs/kvservice"]}, "whole folders: nothing is left out"


def test_the_page_asks_for_its_own_files_alone() -> None:
    page = text(INDEX)
    assert set(re.findall(r'(?:src|href)="([^"]+)"', page)) == {f"dashboard/{name}" for name in FILES if name != INDEX}
    for name in FILES:
        for found in re.findall(r"(?:https?:)?//[a-z0-9.]+\.[a-z]+[^\s\"']*", text(name)):
            assert found.startswith("http://www.w3.org/"), f"{name}: a namespace is no address, {found} is"
        assert "@import" not in text(name)
        assert "url(" not in text(name)


def test_nothing_is_inline_and_nothing_makes_markup_of_text() -> None:
    page, script = text(INDEX), text("dashboard.js")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser",
                "createContextualFragment", "setHTML", "srcdoc", "localStorage", "document.cookie"):  # fmt: skip
        assert way not in script, way


def test_the_script_finds_what_it_looks_for_and_controls_have_labels() -> None:
    page, script = text(INDEX), text("dashboard.js")
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"byId\('([^']+)'\)", script)) <= set(ids)
    for tag, attributes in re.findall(r"<(input|select|textarea)\b([^>]*)>", page):
        its = re.search(r'id="([^"]+)"', attributes)
        assert its is not None, tag
        assert f'for="{its[1]}"' in page, f"{its[1]} has no label"
    for its in re.findall(r'aria-labelledby="([^"]+)"', page):
        assert its in ids
    for table, columns in (("workers", "WORKER"), ("tiers", "TIER"), ("ledger", "LEDGER")):
        head = re.search(rf'<table id="{table}">(.*?)</thead>', page, re.DOTALL)
        cells = re.search(rf"const {columns}_COLUMNS = \[(.*?)\n\];", script, re.DOTALL)
        assert head is not None
        assert cells is not None
        assert head[1].count('<th scope="col"') == len(re.findall(r"\['", cells[1])), table


@pytest.mark.parametrize("part", ["default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
                                  "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'",
                                  "require-trusted-types-for 'script'"])  # fmt: skip
def test_the_policy_is_strict(part: str) -> None:
    said = POLICY.decode()
    assert part in said.split("; ")
    assert "unsafe" not in said
    assert "*" not in said


def test_its_files_are_described() -> None:
    (operation,) = [one for one in OPERATIONS if one.path == "/dashboard/{file}"]
    assert set(operation.parameters[0]["schema"]["enum"]) == set(FILES) - {INDEX}
