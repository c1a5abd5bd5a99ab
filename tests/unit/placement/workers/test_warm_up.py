"""The index's kernels are compiled before they are needed, where nothing can be kept too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfleet.placement.index.changes import read_changes
from kvfleet.placement.index.kv_indexer import KvIndexer
from kvfleet.placement.index.prefix_index import pack
from kvfleet.placement.workers.warm_up import KERNELS, SOURCES
from kvproto import codec
from kvproto.messages import BlockRun, KvEvents, Snapshot, Tier, TierEvents
from kvservice.kernel_cache import results_folder

PROGRAM = """
import numba
from numba.core import event
from kvfleet.placement.workers.warm_up import KERNELS, warm_up
before = numba.config.CACHE_DIR
{code}
with event.install_recorder("numba:compile") as compilations:
    warm_up()
assert numba.config.CACHE_DIR == before
assert bool(len(compilations.buffer)) == {compiles}, [one.data for _, one in compilations.buffer]
print(sum(sum(one.stats.cache_hits.values()) for one in KERNELS), sum(len(one.signatures) for one in KERNELS))
"""


def run(code: str = "", *, compiles: bool, **variables: str) -> tuple[int, int]:
    """How many of the compiled functions a new process found, of how many."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(code=code, compiles=compiles)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found, compiled = map(int, done.stdout.split())
    return found, compiled


def test_nothing_is_left_to_compile() -> None:
    compiled = [len(kernel.signatures) for kernel in KERNELS]
    assert sum(compiled) > 0
    names = [bytes((number % 256, number // 256)) * 8 for number in range(3_000)]
    indexer = KvIndexer(2_000, 2)
    for worker in ("v", "w"):
        indexer.join(worker, "e")
    for seq in range(1, 4):
        hashes = tuple(names[(seq - 1) * 1_000 : seq * 1_000])
        stored = TierEvents(Tier.DEVICE, False, (BlockRun(b"", hashes),))
        indexer.on_changes("v", read_changes(codec.encode_events(KvEvents("e", seq, (stored,)))), 0)
    removed = TierEvents(Tier.DEVICE, True, (BlockRun(b"", hashes),))
    indexer.on_changes("v", read_changes(codec.encode_events(KvEvents("e", 4, (removed,)))), 0)
    indexer.on_changes("w", read_changes(codec.encode_events(KvEvents("e", 9, ()))), 0)
    assert indexer.tick(0)
    indexer.on_snapshot("w", Snapshot("e", 9, Tier.HOST, 0, 1, 0, b"".join(names[-1_000:])), 0)
    assert indexer.find_matches(names) == {"v": 2_000 - 1_024}, "it gave way"
    indexer.depths(pack(names), ("v",))
    indexer.index.compact()
    indexer.leave("v")
    indexer.tick(1)
    assert [len(kernel.signatures) for kernel in KERNELS] == compiled


def test_another_process_finds_what_was_compiled() -> None:
    if results_folder(SOURCES) != results_folder(SOURCES):
        pytest.skip("nothing is kept on this machine")
    found, compiled = run(compiles=False)
    assert found == compiled > 0


def test_where_nothing_can_be_kept_it_is_compiled_anew(tmp_path: Path) -> None:
    """As in a read-only image, under a user without a home: one kernel's worth, as all take their time."""
    code = """
import tempfile
from kvfleet.placement.workers import warm_up as module
from kvfleet.placement.index import reading
tempfile.tempdir = "/proc"
module.KERNELS = KERNELS = (reading.read,)
module._call_all = lambda: module.read_changes(b"\\x01\\x93\\xa1e\\x01\\x90")
"""
    assert run(code, compiles=True, HOME="/proc", XDG_CACHE_HOME="", NUMBA_CACHE_DIR="") == (0, 1)
    assert not list(tmp_path.iterdir())
