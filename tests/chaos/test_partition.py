"""A worker whose network fails, in network namespaces: packets do not arrive, and connections stay open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.lab import Lab, why_not

ROOT = Path(__file__).parents[2]


def test_a_stream_survives_a_partition_of_its_worker(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Lab.open("w0", "w1") as lab:
        hosts = [f"{host.name}={host.namespace}={host.cable}={host.address}" for host in lab.hosts.values()]
        command = [sys.executable, "-m", "tests.chaos.partition_scenario", str(tmp_path), *hosts]
        done = subprocess.run(
            lab.command(*command),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}", "LAB": lab.namespace},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
    logs = "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{logs}"
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["equal"], seen
    assert seen["tokens"] == 300
    assert len(set(seen["workers"])) == 2, "it began on one and ended on the other"
    assert seen["gap_s"] < 3.5, seen
    assert seen["same_epoch"], "its blocks are still there"
