"""An address or a key that no request can be sent with: one line and exit code 1, from every command that asks."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvfleet.cli.commands import app

HERE = "http://127.0.0.1:1"
PLAN = ["plan", "demo", "--requests-per-second=1", "--ttft=1"]
COMMANDS = {
    "generate": (["generate", "x"], "--url"),
    "chat": (["chat"], "--url"),
    "explain": (["explain", "r1"], "--url"),
    "top": (["top", "--once"], "--url"),
    "plan": (PLAN, "--from-fleet"),
}


def said(command: list[str], env: dict[str, str] | None = None) -> str:
    """The one line. Raises what the command raises."""
    ran = CliRunner().invoke(app, command, env=env, catch_exceptions=False)
    assert (ran.exit_code, ran.stdout) == (1, ""), ran.output
    assert ran.stderr.startswith("kvfleet: "), ran.stderr
    assert ran.stderr.count("\n") == 1
    return ran.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_one_line(name: str) -> None:
    command, option = COMMANDS[name]
    assert "Invalid port: '9x'" in said([*command, f"{option}=http://h:9x"])
    for key in ("sk–x", "sk\nx", "sk\x1bx", "ключ"):
        line = said([*command, f"{option}={HERE}", f"--api-key={key}"])
        assert "not printable ASCII" in line
        assert key not in line, "a key is shown to nobody"
    assert "refused" in said([*command, f"{option}={HERE}", "--api-key=sk-x"]), "a good one is asked with"


@pytest.mark.parametrize(
    "url",
    ["http://[::1", "http://256.1.1.1", "http://h\x01", f"http://{'a' * 70}", "http://a..b", "http://xn--zz.invalid"],
)
def test_whatever_is_wrong_with_an_address(url: str) -> None:
    assert "\x01" not in said(["top", f"--url={url}"])


def test_the_environment_is_read_as_the_flags_are() -> None:
    assert "Invalid port" in said(["top"], {"KVFLEET_URL": "http://h:9x"})
    assert "not printable ASCII" in said(["top"], {"KVFLEET_URL": HERE, "KVFLEET_API_KEY": "sk–x"})


@pytest.mark.parametrize("url", ["http://[::1]:1", "http://localhost:1", "http://127.0.0.1:1/"])
def test_what_could_be_one_is_asked(url: str) -> None:
    assert "[Errno" in said(["explain", "r1", f"--url={url}"])
