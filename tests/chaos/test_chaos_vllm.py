"""The quick form of the chaos with vLLM workers: a few faults, and every promise kept. `make chaos ENGINE=vllm` is the
long one. It is a process of its own, so that neither of these tests waits for vLLM's servers to start twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.process import ROOT
from tests.chaos.schedule import Kind
from tests.support.vllm_server import GUARD, vllm_python
from tests.support.waiting import wait_until

KINDS = (Kind.VLLM_ENGINE_KILL, Kind.VLLM_STOP, Kind.KILL, Kind.DRAIN, Kind.NATS_DRAIN)
WAIT_S = 280.0


@dataclass
class Run:
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def told(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    vllm_python()  # skips
    folder = tmp_path_factory.mktemp("chaos")
    command = [sys.executable, "-m", "tests.chaos.run", "--engine", "vllm", "--minutes", "0.3", "--seed", "5"]
    command += ["--faults", str(len(KINDS)), "--report", str(folder), *(f"--kind={kind}" for kind in KINDS)]
    guard = [sys.executable, str(GUARD), "0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*guard, *command], cwd=ROOT, stderr=log, start_new_session=True)
    yield Run(process, folder)
    process.terminate()
    process.wait()


def test_all_answers_are_learnt(chaos: Run) -> None:
    wait_until(lambda: "answers learnt" in chaos.told or chaos.has_ended, WAIT_S, told=lambda: chaos.told, pause_s=0.2)
    assert not chaos.has_ended, chaos.told


def test_every_promise_is_kept(chaos: Run) -> None:
    wait_until(lambda: chaos.has_ended, WAIT_S, told=lambda: chaos.told, pause_s=0.2)
    assert chaos.process.returncode == 0, chaos.told
    page = (chaos.folder / "reliability-vllm.md").read_text()
    assert "| **requests lost** | **0** |" in page
    assert all(f"| {kind.value} |" in page for kind in KINDS)
    assert (chaos.folder / "reliability-vllm.svg").exists()
