"""What a vault's disk tier counts on of a file system, asked of the real one and of the simulated one by the same
functions; and what only the simulated one can be made to do.

BEHAVIOURS take a `Stage`, SIMULATED a `SimDisk` that `files.install` has put in place. They assert.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvfleet.vault.disk.disk import DiskStore
from kvproto.dataplane.block import BlockHeader
from tests.dst import files, threads
from tests.dst.files import SimDisk
from tests.dst.hub import Actor, Hub, Place
from tests.support import kv_blocks
from tests.support.kv_blocks import ROOT, Block

ROOM, SEGMENT = 10_000_000, 20_000
SMALL = 60_000  # a store that is soon full
INTO = memoryview(bytearray(10_000))


class Stage(Protocol):
    """`os` and `fcntl`: what the disk tier has of them."""

    folder: Path

    @property
    def os(self) -> Any: ...
    @property
    def fcntl(self) -> Any: ...
    def full(self, store: DiskStore, more: int) -> AbstractContextManager[None]:
        """Meanwhile there is room for only so many bytes more in its one segment."""


BEHAVIOURS: dict[str, Callable[[Stage], None]] = {}
SIMULATED: dict[str, Callable[[SimDisk], None]] = {}


def behaviour(function: Callable[[Stage], None]) -> Callable[[Stage], None]:
    BEHAVIOURS[function.__name__] = function
    return function


def simulated(function: Callable[[SimDisk], None]) -> Callable[[SimDisk], None]:
    SIMULATED[function.__name__] = function
    return function


@cache
def block(number: int) -> Block:
    return kv_blocks.block(ROOT, 4 * number, size=random.Random(number).randrange(64, 5_000))


def fill(store: DiskStore, numbers: range) -> list[BlockHeader]:
    for number in numbers:
        store.append(block(number).header, block(number).payload)
    return [block(number).header for number in numbers]


def opened(folder: Path, max_bytes: int = ROOM, segment_bytes: int = SEGMENT) -> tuple[DiskStore, list[BlockHeader]]:
    store = DiskStore(folder, max_bytes, segment_bytes)
    return store, store.open()


def is_whole(store: DiskStore, number: int) -> bool:
    """Whether it is there; it must then be what was stored."""
    one = block(number)
    found = store.read(one.hash, INTO)
    assert found is None or (found == one.header and INTO[: found.length] == one.payload), number
    return found is not None


def leaves_nothing(disk: SimDisk, number: int) -> bool:
    data, everything = block(number).payload, b"".join(file.cached for file in disk.files.values())
    return not any(data[at : at + 32] in everything for at in {0, len(data) // 2 - 16, len(data) - 32})


# ---------------------------------------------------------------------------------------------- on both


@behaviour
def blocks_come_back(stage: Stage) -> None:
    store, found = opened(stage.folder)
    assert found == []
    headers = fill(store, range(30))
    for _ in range(2):
        assert all(is_whole(store, number) for number in range(30))
        store.check_integrity()
        store.close()
        store, found = opened(stage.folder)
        assert found == headers
    fill(store, range(30, 35))
    store.close()
    store, found = opened(stage.folder)
    assert len(found) == 35
    assert store.counts.torn == 0
    store.close()


@behaviour
def forgotten_blocks_are_gone(stage: Stage) -> None:
    store, _ = opened(stage.folder)
    headers = fill(store, range(30))
    before = len(list(stage.folder.iterdir()))
    store.forget(header.hash for header in headers[:20])
    assert len(list(stage.folder.iterdir())) < before
    for _ in range(2):
        assert [number for number in range(30) if is_whole(store, number)] == list(range(20, 30))
        store.check_integrity()
        store.close()
        store, found = opened(stage.folder)
        assert found == headers[20:]
    store.close()


@behaviour
def the_oldest_make_room(stage: Stage) -> None:
    store, _ = opened(stage.folder, SMALL)
    for number in range(100):
        fill(store, range(number, number + 1))
        store.check_integrity()
    there = [number for number in range(100) if is_whole(store, number)]
    assert there == list(range(100 - len(there), 100))
    store.close()
    store, found = opened(stage.folder, SMALL // 2)
    assert 0 < len(found) < len(there)
    store.check_integrity()
    store.close()


@behaviour
def a_full_disk_stores_nothing_and_breaks_nothing(stage: Stage) -> None:
    store, _ = opened(stage.folder, segment_bytes=ROOM)
    fill(store, range(4))
    large = kv_blocks.block(ROOT, 4_000, size=9_000)
    with stage.full(store, 2_000):
        for _ in range(2):
            with pytest.raises(OSError):
                store.append(large.header, large.payload)
            store.check_integrity()
    fill(store, range(4, 6))
    store.close()
    store, found = opened(stage.folder)
    assert len(found) == 6
    assert store.counts.torn == 0
    store.close()


@behaviour
def a_folder_has_one_store(stage: Stage) -> None:
    store, _ = opened(stage.folder)
    fill(store, range(2))
    with pytest.raises(BlockingIOError, match="another vault"):
        opened(stage.folder)
    assert is_whole(store, 1)
    store.close()
    store, found = opened(stage.folder)
    assert len(found) == 2
    store.close()


@behaviour
def calls_do_what_they_do(stage: Stage) -> None:
    os, folder = stage.os, stage.folder
    with pytest.raises(FileNotFoundError):
        os.listdir(folder)
    with pytest.raises(FileNotFoundError):
        os.open(folder / "one", os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(2):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with pytest.raises(FileNotFoundError):
        os.open(folder / "one", os.O_RDWR)
    file = os.open(folder / "one", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with pytest.raises(FileExistsError):
        os.open(folder / "one", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    assert os.pwritev(file, [b"abc", memoryview(b"defg")], 2) == 7
    assert os.pread(file, 100, 0) == b"\0\0abcdefg"
    parts = [memoryview(bytearray(4)), memoryview(bytearray(20))]
    assert os.preadv(file, parts, 3) == 6
    assert bytes(parts[0]) + bytes(parts[1])[:3] == b"bcdefg\0"
    assert os.preadv(file, parts, 9) == os.preadv(file, parts, 50) == 0
    for size in (4, 6):
        os.ftruncate(file, size)
        assert os.fstat(file).st_size == (folder / "one").stat().st_size == size
    assert os.pread(file, 100, 0) == b"\0\0ab\0\0"
    os.fsync(file)
    (folder / "one").unlink()
    assert not (folder / "one").exists()
    assert os.listdir(folder) == []
    assert os.pread(file, 2, 2) == b"ab", "while it is open"
    os.close(file)
    for call in (partial(os.close, file), partial(os.pread, file, 1, 0), partial(os.fdatasync, file)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()
    with pytest.raises(FileNotFoundError):
        (folder / "one").unlink()
    (folder / "one").unlink(missing_ok=True)


@behaviour
def a_lock_is_of_what_was_opened(stage: Stage) -> None:
    os, fcntl, how = stage.os, stage.fcntl, stage.fcntl.LOCK_EX | stage.fcntl.LOCK_NB
    stage.folder.mkdir(parents=True, exist_ok=True)
    first, second = (os.open(stage.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2))
    fcntl.flock(first, how)
    fcntl.flock(first, how)
    with pytest.raises(BlockingIOError):
        fcntl.flock(second, how)
    os.close(first)
    fcntl.flock(second, how)
    os.close(second)


# ---------------------------------------------------------------------------------------------- faults


@simulated
def a_disk_that_fails_is_as_none(disk: SimDisk) -> None:
    store, _ = opened(disk.folder)
    fill(store, range(3))
    disk.failing = 1.0
    with pytest.raises(OSError, match="Input/output"):
        fill(store, range(3, 4))
    assert not is_whole(store, 0)
    disk.failing = 0.0
    assert is_whole(store, 1)


@simulated
def rot_is_found(disk: SimDisk) -> None:
    store, _ = opened(disk.folder)
    assert not disk.flip()
    fill(store, range(30))
    assert all(disk.flip() for _ in range(5))
    whole = [number for number in range(30) if is_whole(store, number)]
    assert 25 <= len(whole) < 30
    store.close()
    disk.power_cut(names=1.0)
    store, found = opened(disk.folder)
    assert {header.hash for header in found} <= {block(number).hash for number in whole}


@simulated
def calls_of_a_slow_disk_take_their_time(disk: SimDisk) -> None:
    hub, disk.slow_s = disk.hub, 0.01
    began, ended = hub.now, []

    def work() -> None:
        store, _ = opened(disk.folder)
        fill(store, range(1))
        assert is_whole(store, 0)
        ended.append(hub.now)

    Actor(hub.place("vault"), work, "work").wake()
    hub.run(lambda: bool(ended), 10.0)
    assert 0.05 < ended[0] - began < 0.5


# ---------------------------------------------------------------------------------------------- deaths


def write_for_ever(disk: SimDisk, first: int, told: dict[str, set[int]], folder: Path) -> None:
    store, _ = opened(folder)
    for number in count(first):
        fill(store, range(number, number + 1))
        told["stored"].add(number)
        if number % 5 == 3 and number - 3 >= first:
            told["erasing"].add(number - 3)
            store.forget([block(number - 3).hash])
            told["erased"].add(number - 3)


def lives(disk: SimDisk, *, power_cut: bool) -> None:
    """Each of a writer that ends at a moment of its own. What it said it erased is not there, nor anything wrong."""
    disk.slow_s, disk.cuts = 1e-4, 0.5
    hub, told, first = disk.hub, {"stored": set[int](), "erasing": set[int](), "erased": set[int]()}, 0
    for life in range(4):
        place, over = hub.place(f"life {life}"), list[bool]()
        Actor(place, partial(write_for_ever, disk, first, told, disk.folder), "writer").wake()
        hub.at(hub.now + hub.random.uniform(0.002, 0.03), partial(over.append, True))
        hub.run(lambda over=over: bool(over), 1.0)  # type: ignore[misc]
        die(place, disk)
        if power_cut:
            disk.power_cut()
        first = max(told["stored"], default=0) + 2  # one may be there that it did not come to tell
        store, found = opened(disk.folder)
        store.check_integrity()
        there = {number for number in range(first) if is_whole(store, number)}
        assert not there & told["erased"]
        assert all(leaves_nothing(disk, number) for number in told["erased"])
        if not power_cut:
            assert len(there) == len(found)
            assert there >= told["stored"] - told["erasing"]
            assert store.counts.torn <= 1
            assert store.counts.damaged == store.counts.dropped == 0
        told["stored"] &= there
        store.check_integrity()
        store.close()
    assert first > 20
    hub.close()


def die(place: Place, disk: SimDisk) -> None:
    place.die()
    disk.died(place)


@simulated
def a_kill_costs_a_torn_record_at_most(disk: SimDisk) -> None:
    lives(disk, power_cut=False)


@simulated
def a_power_cut_brings_nothing_wrong_and_nothing_forgotten(disk: SimDisk) -> None:
    lives(disk, power_cut=True)


@simulated
def a_lock_goes_with_its_process_alone(disk: SimDisk) -> None:
    hub = disk.hub
    hub.here = place = hub.place("vault")
    fill(opened(disk.folder)[0], range(3))
    hub.here = hub.world
    with pytest.raises(BlockingIOError):
        opened(disk.folder)
    die(place, disk)
    store, found = opened(disk.folder)
    assert len(found) == 3
    store.close()


@simulated
def what_was_synced_stays(disk: SimDisk) -> None:
    store, _ = opened(disk.folder)
    headers = fill(store, range(20))
    disk.settle()
    fill(store, range(20, 30))
    store.forget([headers[0].hash])
    disk.power_cut(writes=0.0, names=0.0)
    store, found = opened(disk.folder)
    assert headers[1:] == [header for header in found if header in headers]
    assert all(is_whole(store, number) for number in range(1, 20))
    assert leaves_nothing(disk, 0)


@simulated
def names_that_were_not_synced_may_be_as_before(disk: SimDisk) -> None:
    os, folder = files.SimOs(), disk.folder
    for name in ("old", "older"):
        os.close(os.open(folder / name, os.O_RDWR | os.O_CREAT))
    disk.settle()
    for name in ("new", "synced"):
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT)
        os.pwritev(file, [name.encode()], 0)
    os.fdatasync(file)
    (folder / "old").unlink()
    disk.power_cut(names=0.0)
    assert sorted(os.listdir(folder)) == ["old", "older", "synced"]
    (folder / "old").unlink()
    os.fsync(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    (folder / "older").unlink()
    disk.power_cut(names=0.0)
    assert sorted(os.listdir(folder)) == ["older", "synced"]


def a_write_tears_at_sectors(seed: int) -> bytes:
    """What is there after a power cut of a kilobyte that was written over, and of two more."""
    disk, os = SimDisk(Hub(seed), "torn"), files.SimOs()
    file = os.open(disk.folder / "file", os.O_RDWR | os.O_CREAT)
    os.pwritev(file, [b"a" * 1024], 0)
    os.fsync(file)
    os.pwritev(file, [b"b" * 3000], 100)
    disk.power_cut(writes=0.0)
    return os.pread(os.open(disk.folder / "file", os.O_RDWR), 9_999, 0)


# ---------------------------------------------------------------------------------------------- threads


def vaults(seed: int) -> list[str]:
    """What happened to lives of a vault's store and its disk's thread. After `threads.install`."""
    from kvfleet.vault.disk.disk_thread import DiskThread
    from kvfleet.vault.store.store import VaultStore

    hub = Hub(seed)
    threads.begin(hub)
    disk, numbers, lines, erased = SimDisk(hub, "vault", cuts=0.3), count(), list[str](), set[int]()

    def live() -> None:
        store, found = opened(disk.folder, SMALL, 10_000)
        thread = DiskThread(store)
        vault = VaultStore(60_000, thread, on_disk=found)
        thread.start(vault)
        for number in numbers:
            one = block(number)
            if (buffer := vault.reserve(one.header)) is not None:
                buffer[:] = one.payload
                vault.commit(one.header, buffer)
            asked = max(0, number - hub.random.randrange(30))
            (got,) = (served := vault.get(ROOT, [block(asked).hash], True)).blocks
            assert got is None or (asked not in erased and got[1] == block(asked).payload)
            served.release()
            lines.append(f"{hub.now:.6f} {number} {asked} {got is not None} {len(store)}")
            if number % 7 == 0 and vault.erase(ROOT, [block(asked).hash]):
                erased.add(asked)
            hub.sleep(hub.random.uniform(0.0, 0.002))

    def work() -> None:
        try:
            live()
        except RuntimeError:
            assert hub.is_over, "last words find locks that nobody holds any more"

    for life in range(4):
        disk.slow_s = hub.random.choice((0.0, 1e-4, 1e-3))
        place, over = hub.place(f"life {life}"), list[bool]()
        Actor(place, work, "client").wake()
        hub.at(hub.now + hub.random.uniform(0.05, 0.2), partial(over.append, True))
        hub.run(lambda over=over: bool(over), 1.0)  # type: ignore[misc]
        die(place, disk)
    hub.close()
    return lines
