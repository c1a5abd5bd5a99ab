"""Our tier below vLLM's own: its TieringOffloadingSpec in its interpreter, without a device."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.vllm_server import ENV, ROOT, vllm_python

TRIALS = (
    "there_and_back", "what_only_vllm_has_is_saved", "a_load_that_fails_is_computed",
    "a_worker_that_goes_during_a_load", "a_host_memory_that_is_full", "a_preempted_request_is_brought_nothing_twice",
    "a_request_that_is_aborted_while_it_loads", "an_order_to_erase_empties_host_memory", "a_reset_waits_for_copies",
    "another_configuration_is_refused",
)  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """One process for all: importing vLLM takes a while."""
    command = [vllm_python(), "-P", str(Path(__file__).with_name("tier_trial.py"))]
    folder = tmp_path_factory.mktemp("tier")
    env = {**os.environ, **ENV, "PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"}
    ran = subprocess.run([*command, str(folder)], env=env, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    assert tuple(found) == TRIALS
    return found


@pytest.mark.parametrize("trial", TRIALS)
def test_a_trial(told: Mapping[str, str], trial: str) -> None:
    assert told[trial] == ""
