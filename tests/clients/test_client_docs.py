"""The page on clients: its versions are those that are installed, its programs run, its commands are the tested ones.

Its programs are marked `{ .python }`, so that they are not run where the clients are not (`tests/docs`).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.client_scripts import HERE, Clients, script_of
from tests.docs.pages import text_of

PAGE = text_of("docs/clients.md")
PROGRAM = re.compile(r"^## ([^\n]+)\n[^#]*?^``` \{ \.python \}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("client", "program"), PROGRAM.findall(PAGE))
def test_programs_run(clients: Clients, client: str, program: str, tmp_path: Path) -> None:
    there = program.replace("http://127.0.0.1:8080", clients.base).replace('"none"', f'"{clients.key}"')
    (path := tmp_path / "program.py").write_text(there)
    done = clients.run(client, path)
    assert done.status == 0, done.stderr
    assert done.stdout.strip()
    assert done.outside == []


def test_versions_are_the_pinned_ones() -> None:
    pinned = "\n".join(path.read_text() for path in sorted((HERE / "requirements").glob("*.txt")))
    named = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \|", PAGE, re.MULTILINE)
    wanted = "\n".join(path.read_text() for path in (HERE / "requirements").glob("*.in"))
    assert {client for client, _ in named} == set(re.findall(r"^[\w-]+", wanted, re.MULTILINE))
    for client, version in named:
        assert f"{client}=={version}\n" in pinned


def test_commands_are_those_of_the_scripts() -> None:
    scripts = [script_of(name).read_text() for name in ("lm_eval_run", "aiperf_profile", "guidellm_run")]
    commands = re.findall(r"^\$ (?:\w+=\w+ )?([\w-]+) (.*?)(?=^\$|^```)", PAGE, re.MULTILINE | re.DOTALL)
    assert len(commands) == len(scripts)
    for (name, command), script in zip(commands, scripts, strict=True):
        assert f'"{name}"' in script
        for flag in re.findall(r"--[\w-]+|\w+(?==)", command):
            assert flag in script, flag
