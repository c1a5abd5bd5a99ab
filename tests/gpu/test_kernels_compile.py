"""The attention's kernels are what Triton's compiler takes too, and fit onto a GPU: its interpreter is more lenient."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # that one program may take: an A100's and an H100's


def printed(module: str, **variables: str) -> str:
    environment = os.environ | {"TRITON_INTERPRET": "0"} | variables
    ran = subprocess.run([sys.executable, "-m", module], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def test_a_kernel_counts_when_it_is_compiled_and_not_when_it_is_found(tmp_path: Path) -> None:
    assert printed("tests.gpu.counted_kernel", TRITON_CACHE_DIR=str(tmp_path)).strip() == "['add']"


def test_they_compile_and_fit() -> None:
    made = [json.loads(line) for line in printed("tests.gpu.compiled_kernels").splitlines()]
    assert {one["kernel"] for one in made} == {"store", "attend", "combine"}
    for one in made:
        assert one["shared"] <= SHARED_BYTES[one["sm"]], one
