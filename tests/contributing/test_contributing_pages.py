"""The pages of docs/contributing hold: each is followed to the letter in a copy of the tree, and its command passes.

A block with a title is a file: a new one, or, as `diff`, changes of one that is there, each of which fits in exactly
one place; `@@` stands between changes. The last block is the command to try it with.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "contributing").glob("*.md"))
MOST_LINES, MOST_COLUMNS = 64, 140  # one screen
BLOCK = re.compile(r'^```(python|diff) title="([^"\n]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```bash\npytest (.*)\n```$", re.MULTILINE)


def changed(text: str, diff: str) -> str:
    for change in diff.split("@@\n"):
        lines = change.splitlines(keepends=True)
        assert all(line[0] in " +-" for line in lines), change
        before = "".join(line[1:] for line in lines if line[0] != "+")
        assert text.count(before) == 1, f"fits in {text.count(before)} places:\n{change}"
        text = text.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
    return text


def follow(page: Path, tree: Path) -> list[str]:
    """Writes and changes what the page says; returns which files."""
    blocks = BLOCK.findall(page.read_text())
    for kind, name, text in blocks:
        file = tree / name
        assert file.exists() == (kind == "diff"), name
        file.write_text(changed(file.read_text(), text) if kind == "diff" else text)
    return [name for _, name, _ in blocks]


def run(tree: Path, *command: str, **env: str) -> None:
    """Kernels are not compiled: a copy has none that an earlier run compiled, and each would take a minute. NumPy warns
    of what they let overflow."""
    uncompiled = {"NUMBA_DISABLE_JIT": "1", "PYTEST_ADDOPTS": "--part quick -W ignore::RuntimeWarning"}
    env = {**os.environ, "PYTHONPATH": f"{tree / 'libs'}:{tree}", **uncompiled, **env}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tree, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What product and tests are made of, with what Python has compiled of it."""
    for folder in ("services", "libs", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("deploy"))
    for file in ("pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / file, tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_says_works(page: Path, tree: Path, nats_url: str) -> None:
    follow(page, tree)
    (command,) = COMMAND.findall(page.read_text())
    run(tree, "pytest", "-p", "no:cacheprovider", *shlex.split(command), NATS_TEST_URL=nats_url)


def test_the_house_stands_when_all_are_followed(tree: Path) -> None:
    names = [name for page in PAGES for name in follow(page, tree)]
    run(tree, "ruff", "format", "--check", *names)
    run(tree, "ruff", "check", *names)
    run(tree, "pytest", "-p", "no:cacheprovider", "tests/unit/test_import_law.py", "tests/unit/test_house.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_one_screen(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= MOST_COLUMNS


def test_there_are_four_pages() -> None:
    assert [page.stem for page in PAGES] == ["endpoint", "eviction-policy", "placement-policy", "wire-field"]
