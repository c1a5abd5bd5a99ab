"""What of a host is ours: its cores by affinity and by our cgroup's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvservice import host


@pytest.mark.parametrize(
    ("line", "expected"),
    [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("6400000 100000", 8), (None, 8)],
)
def test_cores(line: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if line is not None:
        (tmp_path / "cpu.max").write_text(f"{line}\n")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3, 11)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert host.cores() == expected


def test_memory_is_what_the_cgroup_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    assert host.free_bytes() == 3_000_000
