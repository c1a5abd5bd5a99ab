"""`scripts/gpu_check` comes to its end where there is no GPU, and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import gpu_fleet
from benchmarks.gpu.gpu_fleet import Answer

ROOT = Path(__file__).parents[2]


def test_a_dry_run_comes_to_its_end() -> None:
    done = subprocess.run([ROOT / "scripts/gpu_check", "--dry"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "on no GPU" in done.stdout
    assert "== attention, draws, recorded steps and copies are exact: passed" in done.stdout
    for figure in ("gpu_restore", "gpu_decode", "gpu_prefill", "gpu_sampler", "offload_itl", "restore_ttft"):
        assert f"== {figure}: skipped" in done.stdout
    assert "== gpu_fleet: passed" in done.stdout
    fleet = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"name": "gpu_fleet"')))
    assert {fleet["killed"], fleet["ended_on"]} == {"w0", "w1"}
    assert (fleet["value"], fleet["tokens"]) == (len(gpu_fleet.WAYS), len(gpu_fleet.WAYS) * gpu_fleet.TOKENS)
    assert done.stdout.splitlines()[-1] == "gpu_check: 0 failed"


def test_what_it_does_not_know_is_told_and_nothing_is_run() -> None:
    done = subprocess.run([ROOT / "scripts/gpu_check", "--wet"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "scripts/gpu_check --dry" in done.stdout


@pytest.mark.parametrize("name", ["nats", "starlette", "httptools"])
def test_a_fleet_without_a_package_is_skipped_and_it_is_named(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; from benchmarks.gpu import gpu_fleet; gpu_fleet.main()"
    done = subprocess.run([sys.executable, "-c", code, "--dry"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75, done.stderr
    assert json.loads(done.stdout)["skipped"] == f"no {name}"


def test_a_fleet_without_nats_server_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_fleet.missing() == "no nats-server"


def test_other_tokens_of_a_fleet_are_told() -> None:
    way = gpu_fleet.WAYS[1]
    prompt = Answer([1, 2, 3], "w0", "w1")
    assert gpu_fleet._outcome(way, prompt, Answer([1, 2, 3], "w0", "w0")) == "equal"
    assert gpu_fleet._outcome(way, prompt, Answer([1, 2, 9], "w0", "w0")).startswith("other tokens")
    assert gpu_fleet._outcome(way, Answer(error="gone: 1"), prompt) == "gone: 1"
