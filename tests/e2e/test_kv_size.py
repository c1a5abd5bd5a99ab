"""`kvfleet kv-size` as users type it."""

from __future__ import annotations

import subprocess

import pytest
from typer.testing import CliRunner

from kvfleet.cli.commands import app


@pytest.fixture(scope="module")
def table() -> list[str]:
    flags = ["--memory", "8GiB", "--kv-dtype", "auto", "--kv-dtype", "int8", "--block-size", "32"]
    done = CliRunner().invoke(app, ["kv-size", "demo", *flags])
    assert done.exit_code == 0, done.output
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_piped_it_is_plain_columns(table: list[str]) -> None:
    assert table[0] == "demo: 6 layers x 2 x 2 heads x 64 x 4 bytes a token (float32), context 4,096"
    assert table[1] == "float32 (auto) int8"
    for line in ("a token 6.0 KiB 1.6 KiB", "a block of 32 192.0 KiB 51.0 KiB", "a sequence of 4,096 24.0 MiB 6.4 MiB"):
        assert line in table
    assert "sequences of 4,096 341 1,285" in table


def test_json_is_passed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, '{"model": "demo"}\n')

    monkeypatch.setattr(subprocess, "run", run)
    done = CliRunner().invoke(app, ["kv-size", "demo", "--dtype", "bfloat16", "--json"])
    assert done.stdout == '{"model": "demo"}\n'
    assert "--dtype=bfloat16" in commands[0]


def test_what_is_wrong_ends_with_a_code() -> None:
    assert CliRunner().invoke(app, ["kv-size", "demo", "--memory", "much"]).exit_code == 2


def test_a_memory_without_a_unit_is_refused() -> None:
    done = CliRunner().invoke(app, ["kv-size", "demo", "--memory", "8"])
    assert done.exit_code == 2
    assert done.stderr == "kvfleet: --memory: '8' would be 8 bytes: say 8GiB, or 8B if that is meant\n"
