"""`scripts/gpu_check` comes to its end where there is no GPU, and says so."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_dry_run_comes_to_its_end() -> None:
    done = subprocess.run([ROOT / "scripts/gpu_check", "--dry"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "on no GPU" in done.stdout
    assert "== attention, draws and copies are exact: passed" in done.stdout
    for figure in ("gpu_restore", "gpu_decode", "gpu_prefill", "gpu_sampler", "offload_itl", "restore_ttft"):
        assert f"== {figure}: skipped" in done.stdout
    assert done.stdout.splitlines()[-1] == "gpu_check: 0 failed"


def test_what_it_does_not_know_is_told_and_nothing_is_run() -> None:
    done = subprocess.run([ROOT / "scripts/gpu_check", "--wet"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "scripts/gpu_check --dry" in done.stdout
