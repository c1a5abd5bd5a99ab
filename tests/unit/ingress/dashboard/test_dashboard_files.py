"""The page as it lies in the package: complete, its own files alone, and nothing that could make markup of text.

Its modules: each reached from the first, no import of a name that is not there, none in a circle, and what computes
apart from what shows.
"""

from __future__ import annotations

import re
import tomllib
from graphlib import TopologicalSorter
from importlib import resources
from pathlib import Path

import pytest

from kvfleet.ingress.dashboard.page import INDEX, POLICY, TYPES, read_files, suffix
from kvfleet.ingress.fleet.openapi import openapi_document

ROOT = Path(__file__).parents[4]
FOLDER = resources.files("kvfleet.ingress.dashboard")
FILES = {name: data.decode() for name, data in read_files(FOLDER).items()}
MODULES = {name: script for name, script in FILES.items() if suffix(name) == ".js"}
FIRST, STYLE, BEFORE = "dashboard.js", "dashboard.css", "loading.js"
PURE = {"figures.js", "rates.js", "spans.js", "turn.js"}
IMPORT = re.compile(r"^import \{ ([^}]+) \} from '\./([a-z_]+\.js)';$", re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:function\*?|class|const) (\w+)", re.MULTILINE)


def imports(name: str) -> dict[str, list[str]]:
    """Module -> the names that `name` has of it."""
    return {module: names.split(", ") for names, module in IMPORT.findall(MODULES[name])}


def test_the_files_are_in_the_package_and_the_package_is_what_is_built() -> None:
    beside = {one.name for one in FOLDER.iterdir() if one.is_file() and not one.name.endswith(".py")}
    assert beside == set(FILES)
    assert {suffix(name) for name in FILES} == set(TYPES)
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(built) == {"only-include", "sources"}, "whole folders: nothing is left out"


def test_what_is_served_is_what_lies_there_when_it_is_read(tmp_path: Path) -> None:
    for name in ("a.js", "b.css", "c.html", "d.py", "e.txt", "f.js.map", "g", ".js", ".h.js~"):
        (tmp_path / name).write_text(name)
    (tmp_path / "below.js").mkdir()
    (tmp_path / "below.js" / "i.js").write_text("")
    assert read_files(tmp_path) == {"a.js": b"a.js", "b.css": b"b.css", "c.html": b"c.html"}


def test_each_module_is_reached_and_has_what_it_imports() -> None:
    needed = {name: set(imports(name)) for name in MODULES}
    order = list(TopologicalSorter(needed).static_order())  # raises for a circle
    assert set(order) == set(MODULES), "nothing that is not there"
    assert set.union({FIRST, BEFORE}, *needed.values()) == set(MODULES), "nothing that is not used"
    for name, script in MODULES.items():
        assert len(re.findall(r"\bimport\b(?!\.meta)", re.sub(r"//.*", "", script))) == len(imports(name)), name
        for module, names in imports(name).items():
            assert set(names) <= set(EXPORT.findall(MODULES[module])), (name, module)
            for one in names:
                assert len(re.findall(rf"\b{one}\b", script)) > 1, f"{name} has no use for {one}"


def test_a_module_is_small_and_says_first_what_it_owns() -> None:
    for name, script in MODULES.items():
        assert script.startswith("// "), name
        assert script.count("\n") < 200, name


def test_what_computes_knows_no_page() -> None:
    for name in PURE:
        script = re.sub(r"//.*|/\*\*.*", "", MODULES[name])
        assert set(imports(name)) <= PURE
        assert not re.search(
            r"\b(document\.|window\.|fetch\(|sessionStorage|performance\.|setTimeout|Date\.now)", script
        ), name


def test_the_key_is_in_one_modules_hands() -> None:
    for word in ("sessionStorage", "authorization", "fetch("):
        assert [name for name, script in MODULES.items() if word in re.sub(r"//.*", "", script)] == ["api.js"], word


def test_the_page_asks_for_its_own_files_alone() -> None:
    page = FILES[INDEX]
    assert set(re.findall(r'(?:src|href)="([^"]+)"', page)) == {f"dashboard/{name}" for name in (BEFORE, FIRST, STYLE)}
    assert f'<script type="module" src="dashboard/{FIRST}"></script>' in page
    assert page.index(f'<script src="dashboard/{BEFORE}"></script>') < page.index(STYLE) < page.index(FIRST)
    assert set(FILES) == {INDEX, STYLE, *MODULES}
    for name, text in FILES.items():
        for found in re.findall(r"(?:https?:)?//[a-z0-9.]+\.[a-z]+[^\s\"']*", text):
            assert found.startswith("http://www.w3.org/"), f"{name}: a namespace is no address, {found} is"
        assert "@import" not in text
        assert "url(" not in text


def test_nothing_is_inline_and_nothing_makes_markup_of_text() -> None:
    page, script = FILES[INDEX], "".join(MODULES.values())
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == ["", ""]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser",
                "createContextualFragment", "setHTML", "srcdoc", "localStorage", "document.cookie"):  # fmt: skip
        assert way not in script, way


def test_the_script_finds_what_it_looks_for_and_controls_have_labels() -> None:
    page, script = FILES[INDEX], "".join(MODULES.values())
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"byId\('([^']+)'\)", script)) <= set(ids)
    for tag, attributes in re.findall(r"<(input|select|textarea)\b([^>]*)>", page):
        its = re.search(r'id="([^"]+)"', attributes)
        assert its is not None, tag
        assert f'for="{its[1]}"' in page, f"{its[1]} has no label"
    for its in re.findall(r'aria-labelledby="([^"]+)"', page):
        assert its in ids
    for table, columns in (("workers", "WORKER"), ("tiers", "TIER"), ("ledger", "LEDGER"), ("stays", "STAY")):
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
    operation = openapi_document()["paths"]["/dashboard/{file}"]["get"]
    pattern = operation["parameters"][0]["schema"]["pattern"]
    assert all(re.fullmatch(pattern, name) for name in FILES if name != INDEX)
