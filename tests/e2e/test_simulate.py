"""`kvfleet simulate` as users type it."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest


def kvfleet(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvfleet.cli.main", "simulate", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten conversations of six turns."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = [
        {
            "timestamp": 2000 * turn + 100 * session,
            "input_length": 512 * (3 * turn + 4) - 9,
            "output_length": 30,
            "hash_ids": [0, *(1000 * session + block for block in range(1, 3 * turn + 4))],
        }
        for turn in range(6)
        for session in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_last_line_of_json(trace: str) -> None:
    done = kvfleet("--trace", trace, "--workers", "2", "--policy", "all", "--cache-blocks", "100", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    policies = {one["policy"]: one for one in found["policies"]}
    assert list(policies) == ["cost", "kv_load", "ring", "bounded_ring", "random", "round_robin"]
    assert found["default"] == "cost"
    assert policies["cost"]["hit_rate"] > policies["random"]["hit_rate"] > 0
    assert policies["ring"]["moved"] == 0


def test_a_table_and_a_picture(trace: str, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    flags = ["--load", "0.5", "--loads", "0.3,0.9", "--policy", "cost,ring", "--plot", str(plot)]
    done = kvfleet("--trace", trace, "--workers", "2", *flags)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("60 requests in ")
    assert "0.50 of capacity" in lines[0]
    assert [line.split()[0] for line in lines if line.startswith(("cost", "ring"))] == ["cost", "ring"] * 2
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--trace", "/nowhere"], 1, "/nowhere: No such file or directory"),
        (["--trace", __file__], 1, "line 1 is no request of a trace"),
        (["--trace", "/nowhere", "--workers", "2"], 1, "/nowhere: No such file or directory"),
        (["--trace", __file__, "--workers", "2"], 1, "line 1 is no request of a trace"),
        (["--trace", "/dev/null", "--workers", "2"], 1, "/dev/null: the trace is empty"),
        (["--trace", "TRACE", "--workers", "2", "--plot", "/nowhere/p.svg"], 1, "/nowhere/p.svg: No such file"),
        (["--trace", "TRACE", "--workers", "2", "--limit", "1", "--load", "1"], 1, "come at once"),
        (["--trace", "TRACE", "--workers", "0"], 2, "argument --workers"),
        (["--trace", "TRACE", "--workers", "2", "--policy", "direct"], 2, "'direct' is none of cost, "),
        (["--trace", "TRACE", "--workers", "2", "--load", "nan"], 2, "argument --load"),
        (["--trace", "TRACE"], 2, "--workers"),
        (["--trace", "TRACE", "--autoscale", "3:2"], 2, "argument --autoscale"),
        (["--trace", "TRACE", "--autoscale", "1:2", "--workers", "2"], 2, "one of --workers and --autoscale"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(trace: str, flags: list[str], code: int, said: str) -> None:
    done = kvfleet(*(trace if flag == "TRACE" else flag for flag in flags))
    assert done.returncode == code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert done.stderr.startswith("kvfleet simulate: ")


def test_a_fleet_that_grows(trace: str) -> None:
    flags = ["--autoscale", "1:2", "--scale-up-s", "3", "--prefill-tokens-per-s", "2000", "--start-s", "1"]
    done = kvfleet("--trace", trace, *flags, "--scale-down", "both", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["workers"] == 2
    assert [one["scale_down"] for one in found["autoscaled"]] == ["cheapest", "ordinal"]
    assert all(one["most_workers"] == 2 and one["worker_hours"] > 0 for one in found["autoscaled"])
