"""Commands run in a folder of somebody else's, whose Python files have the names of our packages and libraries."""

from __future__ import annotations

import subprocess
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one. Whatever of it is imported leaves its name in `imported`."""
    (tmp_path / "trace.jsonl").write_text(TRACE)
    code = f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__ + '\\n')\nraise SystemExit(7)\n"
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(code)
    for name in NAMES[:5]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(folder: Path) -> str:
    path = folder / "imported"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_of_the_current_folder_is_imported(folder: Path, name: str) -> None:
    command, code = COMMANDS[name]
    done = subprocess.run(
        [KVFLEET, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    assert imported(folder) == "", done.stderr
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_a_whole_fleet_starts_there(folder: Path) -> None:
    fleet = Up("--runner=fake", "--port=0")
    try:
        fleet.wait_ready()
    finally:
        fleet.stop()
    assert imported(folder) == ""
