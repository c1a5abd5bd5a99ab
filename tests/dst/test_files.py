"""The simulated disk does what the real one does, and what a power cut does; and what the disk tier makes of it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from kvfleet.vault.disk import disk_thread
from kvfleet.vault.disk.disk import DiskStore
from kvfleet.vault.disk.disk_thread import DiskThread
from kvfleet.vault.store.store import VaultStore
from tests.dst import files
from tests.dst.files import SimDisk, SimFcntl, SimOs
from tests.dst.files_behaviours import (
    BEHAVIOURS,
    SIMULATED,
    SMALL,
    a_write_tears_at_sectors,
    block,
    fill,
    is_whole,
    leaves_nothing,
    opened,
)
from tests.dst.hub import Hub
from tests.support.kv_blocks import ROOT
from tests.support.waiting import wait_until

SEEDS = range(1, 13)
VAULTS = """
import os, sys
from tests.dst import threads
threads.install()
from tests.dst import files, files_behaviours
files.install()
for seed in range(1, 6):
    print("\\n".join(files_behaviours.vaults(seed)))
sys.stdout.flush()
os._exit(0)
"""


class RealStage:
    os, fcntl = os, fcntl

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def full(self, store: DiskStore, more: int) -> Iterator[None]:
        """The kernel cuts the write short and then refuses, as on a full disk."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (store.bytes_used + more, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)


class SimStage:
    os, fcntl = SimOs(), SimFcntl()

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self.folder: Path = disk.folder / "deep" / "vault"

    @contextmanager
    def full(self, store: DiskStore, more: int) -> Iterator[None]:
        self._disk.room_bytes = store.bytes_used + more
        yield
        self._disk.room_bytes = None


@pytest.fixture
def seed() -> int:
    return 1


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, seed: int) -> SimDisk:
    files.install(monkeypatch.setattr)
    return SimDisk(Hub(seed), "vault")


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_real(tmp_path: Path, name: str) -> None:
    BEHAVIOURS[name](RealStage(tmp_path / "deep" / "vault"))


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_simulated(disk: SimDisk, name: str) -> None:
    BEHAVIOURS[name](SimStage(disk))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_alone(disk: SimDisk, name: str) -> None:
    SIMULATED[name](disk)


def test_a_write_tears_at_sectors() -> None:
    found = {a_write_tears_at_sectors(seed) for seed in range(200)}
    ends = (100, 512, 1024, 1536, 2048, 2560, 3072, 3100)
    heads = {b"a" * 100 + b"b" * (end - 100) + b"a" * (1024 - end) for end in ends}
    tails = {b"a" * min(end, 1024) + bytes(max(0, end - 1024)) + b"b" * (3100 - end) for end in ends}
    assert found == heads | tails


def test_what_the_product_does_not_use_is_not_there(disk: SimDisk, tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        SimOs().rename  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        disk.folder.glob("*")
    with pytest.raises(KeyError):
        SimOs().open(tmp_path, os.O_RDONLY)
    assert type(TypeAdapter(Path | None).validate_python(disk.folder)) is files.SimPath, "settings leave it as it is"


def test_vaults_on_simulated_threads_run_again_as_they_ran() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    runs = [
        subprocess.run([sys.executable, "-c", VAULTS], env=environment, capture_output=True, text=True, timeout=120)
        for _ in range(2)
    ]
    assert runs[0].stdout.count("\n") > 500, runs[0].stderr[-3000:]
    assert runs[0].stdout == runs[1].stdout
    assert not any(run.returncode for run in runs)


# ---------------------------------------------------------------------------------------------- found


def test_what_was_evicted_and_then_deleted_does_not_come_back(disk: SimDisk) -> None:
    """Its session is deleted when no list has the block any more: the disk is not even asked."""
    store, _ = opened(disk.folder, SMALL)
    vault = VaultStore(1 << 20, DiskThread(store), on_disk=fill(store, range(1)))
    disk.settle()
    fill(store, range(1, 40))
    vault.lost_on_disk(store.take_lost())
    if vault.erase(ROOT, [block(0).hash]) or store.has(block(0).hash):
        raise LookupError("it was to be evicted by then")
    store.forget([block(0).hash])  # nor would that help
    disk.power_cut(writes=1.0, names=0.0)
    store, found = opened(disk.folder, SMALL)
    assert block(0).header not in found
    assert not is_whole(store, 0)


def test_an_erasure_that_a_power_cut_ends_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next scan trusts the mark, and who asks again is told that the block is not there."""
    files.install(monkeypatch.setattr)
    sync, syncs = SimOs.fdatasync, count()

    def first_alone(self: SimOs, number: int) -> None:
        if next(syncs) % 2:
            raise OSError(errno.EIO, "the power went meanwhile")
        sync(self, number)

    monkeypatch.setattr(SimOs, "fdatasync", first_alone)
    for seed in range(20):
        disk = SimDisk(Hub(seed), "vault")
        store, _ = opened(disk.folder)
        headers = fill(store, range(3))
        with pytest.raises(OSError, match="the power"):
            store.forget([headers[1].hash])
        disk.power_cut()
        store, found = opened(disk.folder)
        if headers[1] in found:
            raise LookupError("it was marked for good")
        assert leaves_nothing(disk, 1)


def test_what_the_disk_failed_to_erase_is_erased_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    files.install(monkeypatch.setattr)
    disk = SimDisk(Hub(0), "vault")
    store, _ = opened(disk.folder)
    headers = fill(store, range(3))
    disk.failing = 1.0
    with pytest.raises(OSError, match="Input/output"):
        store.forget([headers[1].hash])
    assert not store.has(headers[1].hash)
    disk.failing = 0.0
    store.forget([])
    store.check_integrity()
    assert leaves_nothing(disk, 1)


def test_an_erasure_is_not_acknowledged_before_the_disk_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a restart in between brings the block back, and nobody asks again."""
    files.install(monkeypatch.setattr)
    monkeypatch.setattr(disk_thread, "PAUSE_S", 0.01)
    disk = SimDisk(Hub(0), "vault")
    store, _ = opened(disk.folder)
    headers = fill(store, range(3))
    thread = DiskThread(store)
    vault = VaultStore(1 << 20, thread, on_disk=headers)
    thread.start(vault)
    disk.failing = 1.0
    for _ in range(2):
        with pytest.raises(OSError, match="not erased all"):
            vault.erase(headers[2].root, [headers[2].hash])
    disk.failing = 0.0
    wait_until(lambda: not thread.owes)  # by itself
    assert vault.erase(headers[2].root, [headers[2].hash]) == 0
    assert leaves_nothing(disk, 2)
    thread.close(0.0)
