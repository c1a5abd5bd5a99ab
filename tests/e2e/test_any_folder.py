"""Commands run in a folder of somebody else's, whose Python files have the names of our packages and libraries."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import KVFLEET
from tests.support.up import Up

NOWHERE = "--nats-url=nats://127.0.0.1:1"
HTTP = "--url=http://127.0.0.1:1"
TRACE = '{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}\n'
NAMES = (
    "services", "kvfleet", "kvproto", "kvservice", "tests", "nats", "msgpack", "torch", "numpy", "numba", "typer",
    "rich", "httpx", "starlette", "uvicorn", "uvloop", "pydantic", "pydantic_settings", "transformers", "tokenizers",
    "queue", "json", "logging", "random", "secrets", "typing_extensions", "sitecustomize", "usercustomize",
)  # fmt: skip
PLAN = ["plan", "demo", "--requests-per-second=1", "--ttft=2", "--prefill-tokens-per-s=4000", "--decode-ms=10"]
COMMANDS = {
    "init": (["init", NOWHERE], 1),
    "generate": (["generate", "x", HTTP], 1),
    "chat": (["chat", HTTP], 1),
    "explain": (["explain", "r1", HTTP], 1),
    "top": (["top", "--once", HTTP], 1),
    "drain": (["drain", "w0", NOWHERE], 1),
    "kv-size": (["kv-size", "demo", "--memory=1GiB"], 0),
    "secrets": (["secrets", "--out=made"], 0),
    "key": (["key", "new"], 0),
    "plan": (PLAN, 0),
    "simulate": (["simulate", "--trace=trace.jsonl", "--workers=1"], 0),
    "worker": (["worker", "--runner=fake", NOWHERE], 1),
    "ingress": (["ingress", "--port=0", NOWHERE], 1),
    "placement": (["placement", NOWHERE], 1),
    "vault": (["vault", NOWHERE], 1),
}


def hostile(folder: Path) -> Path:
    """Whatever of it is imported leaves its name in `imported`."""
    (folder / "trace.jsonl").write_text(TRACE)
    code = f"open({str(folder / 'imported')!r}, 'a').write(__name__ + '\\n')\nraise SystemExit(7)\n"
    for name in NAMES:
        (folder / f"{name}.py").write_text(code)
    for name in NAMES[:5]:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, subprocess.Popen[str]]]]:
    """Every command, each in a folder of its own: half of them wait for a NATS that is not there."""
    every = {}
    for name, (command, _) in COMMANDS.items():
        folder = hostile(tmp_path_factory.mktemp(name))
        quiet, read = subprocess.DEVNULL, subprocess.PIPE
        every[name] = folder, subprocess.Popen(
            [KVFLEET, *command], cwd=folder, stdin=quiet, stdout=quiet, stderr=read, text=True
        )  # fmt: skip
    yield every
    for _, process in every.values():
        process.kill()
        process.communicate()


def imported(folder: Path) -> str:
    path = folder / "imported"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_of_the_current_folder_is_imported(
    started: dict[str, tuple[Path, subprocess.Popen[str]]], name: str
) -> None:
    folder, process = started[name]
    _, stderr = process.communicate(timeout=120)
    assert imported(folder) == "", stderr
    assert process.returncode == COMMANDS[name][1], stderr
    assert "Traceback" not in stderr


def test_a_whole_fleet_starts_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile(tmp_path))
    fleet = Up("--runner=fake", "--port=0")
    try:
        fleet.wait_ready()
    finally:
        fleet.stop()
    assert imported(tmp_path) == ""
