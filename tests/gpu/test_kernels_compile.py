"""The attention's kernels are what Triton's compiler takes too, and fit onto a GPU: its interpreter is more lenient."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # that one program may take: an A100's and an H100's


def test_they_compile_and_fit() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.gpu.compiled_kernels"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    made = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {one["kernel"] for one in made} == {"store", "attend", "combine"}
    for one in made:
        assert one["shared"] <= SHARED_BYTES[one["sm"]], one
