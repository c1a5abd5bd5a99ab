"""What a chaos process is started with really works: a clock that jumps while it runs, and another wire version."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kvproto import codec
from kvproto.errors import VersionMismatch
from kvproto.messages import Progress, SnapshotRequest
from tests.chaos import member
from tests.chaos.process import ROOT
from tests.support.waiting import LIMIT_S

JUMPS = """
import sys, time
from tests.chaos.member import shift_clock
before, steady = time.time(), time.monotonic()
shift_clock(sys.argv[1])
assert abs(time.time() - before) < 5
print("started", flush=True)
sys.stdin.readline()
print(round(time.time() - before), round(time.monotonic() - steady))
"""


def test_the_clock_jumps_while_the_process_runs(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("d", 0.0))
    with subprocess.Popen(
        [sys.executable, "-c", JUMPS, str(clock)],
        cwd=ROOT,
        env=dict(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        clock.write_bytes(struct.pack("d", 7200.0))
        told, _ = process.communicate("\n", timeout=LIMIT_S)
    wall, steady = map(int, told.split())
    assert 7190 < wall < 7260
    assert steady < 60, "what is measured does not notice"


def test_the_next_release_understands_this_one_and_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    old = codec.encode(SnapshotRequest())
    monkeypatch.setattr(codec, "VERSION", codec.VERSION)  # put back afterwards
    monkeypatch.setattr(codec, "MIN_VERSION", codec.MIN_VERSION)
    this = codec.supported_versions()
    member.speak(this[1] + 1)
    assert codec.decode(SnapshotRequest, old) == SnapshotRequest()
    for_all = codec.encode_frames([Progress("r", 0, 1)])
    to_one = codec.encode(SnapshotRequest(), codec.common_version(this))
    to_another = codec.encode(SnapshotRequest(), codec.common_version(codec.supported_versions()))
    monkeypatch.undo()
    assert codec.decode_frames(for_all) == [Progress("r", 0, 1)], "what many read"
    assert codec.decode(SnapshotRequest, to_one) == SnapshotRequest()
    with pytest.raises(VersionMismatch):
        codec.decode(SnapshotRequest, to_another)
