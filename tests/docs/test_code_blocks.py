"""Code of the pages is run, against a fleet of two workers.

A block that says `python` is a whole program. The blocks of one page that say `bash` are one script, in their order,
that needs `kvfleet`, curl and this machine alone. `json` and `toml` can be read. Any other block, such as a `console`
that shows what was typed and answered, is not run. The pages of docs/contributing change the code itself: a test of
their own follows them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import CodeBlock, code_blocks, pages
from tests.support.up import Up

BLOCKS = [block for page in pages() if not page.startswith("docs/contributing/") for block in code_blocks(page)]
LANGUAGES = {"", "console", "python", "bash", "json", "toml"}
LIMIT_S = 180


def of(language: str) -> list[CodeBlock]:
    return [block for block in BLOCKS if block.language == language]


def named(block: CodeBlock) -> str:
    return f"{block.page}:{block.line}"


def run(command: list[str], text: str, up: Up, folder: Path) -> str:
    """What it says, run where a reader would: with the fleet's own addresses in place of those that `make run` has."""
    there = text.replace("http://127.0.0.1:8080", up.base).replace("nats://127.0.0.1:4222", up.nats_url)
    path = folder / "block"
    path.write_text(there)
    scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*command, str(path)], cwd=folder, env={**os.environ, "PATH": scripts}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{up.stderr}"
    return done.stdout


def test_languages_are_known() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert of("python")
    assert of("bash")


@pytest.mark.parametrize("block", of("python"), ids=named)
def test_python_runs(block: CodeBlock, up: Up, tmp_path: Path) -> None:
    run([sys.executable, "-W", "error::SyntaxWarning"], block.text, up, tmp_path)


@pytest.mark.parametrize("page", sorted({block.page for block in of("bash")}))
def test_bash_runs(page: str, up: Up, tmp_path: Path) -> None:
    script = "".join(block.text for block in of("bash") if block.page == page)
    said = run(["bash", "-euo", "pipefail"], script, up, tmp_path)
    if page == "docs/first-hour.md":
        assert "the same 600 tokens" in said
        first, last = said.split('"worker_id":"')[-2:]
        assert first.partition('"')[0] != last.partition('"')[0], "another worker went on"


@pytest.mark.parametrize("block", [*of("json"), *of("toml")], ids=named)
def test_data_can_be_read(block: CodeBlock) -> None:
    (json if block.language == "json" else tomllib).loads(block.text)
