"""Models with caches of several kinds in a real vLLM, its CPU build: what our connector saves of them and restores."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.support.tiny_hybrids import linear_attention, short_conv, sliding_window, write_tiny_hybrid
from tests.support.vllm_server import ENV, ROOT, vllm_python


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(short_conv, "float32"), (sliding_window, "float32"), (linear_attention, "bfloat16")],
)
def test_a_model_goes_on_from_what_was_saved(make: Callable[[], PreTrainedModel], dtype: str, tmp_path: Path) -> None:
    """In a process of its own, as importing vLLM takes most of the time."""
    python = vllm_python()  # skips before a model is written
    model = write_tiny_hybrid(tmp_path / "model", make)
    command = [python, "-P", str(Path(__file__).with_name("hybrid_trial.py")), str(model), dtype, str(tmp_path)]
    env = {**os.environ, **ENV, "PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr[-4000:]
    failed: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    assert {name: trace for name, trace in failed.items() if trace} == {}
