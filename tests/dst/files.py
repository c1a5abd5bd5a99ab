"""The disks of a simulated fleet's machines: what the vault's disk tier uses of `os`, `fcntl` and `Path`, in memory.

    write ──▶ cache ──fsync──▶ platter         a kill costs nothing of the cache, a power cut what is not on the platter

* Each write that is not synced is lost, kept, or torn at a multiple of SECTOR of the file, with zeros in place of what
  a file had grown by. With a cut of a file (`ftruncate`) that is lost go its later writes, as journals are in order.
* A power cut may undo that a file was made or unlinked, each by itself, until its folder is synced. To sync a file is
  enough for that one to be there for good, as on ext4 and XFS. Folders are there for good at once.
* A kill cuts a write short at a multiple of SECTOR. Descriptors and locks go with their process, the place that ran.

Only actors wait. What the product does not use is not here, and raises AttributeError.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import PosixPath, PurePosixPath
from random import Random
from typing import Any

from greenlet import getcurrent

from kvfleet.vault.disk import disk, segments
from tests.dst.hub import Hub, Place

ROOT = "/simulated"  # each disk is a folder there
SECTOR = 512
CUT_S = (1e-6, 100e-6)  # between two pieces of a write
KEPT = (0.0, 0.3, 0.7, 0.95, 1.0)  # chances that a power cut draws from
_NUMBERS = count(1 << 20)  # of descriptors: higher than any real one
_DISKS: dict[str, SimDisk] = {}  # the last of each name


@dataclass(eq=False, slots=True)
class _File:
    """`unsynced`: where bytes were written, or, None, the file was cut."""

    cached: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list)
    locked_by: _Open | None = None

    def change(self, at: int, data: bytes | None) -> None:
        self.unsynced.append((at, data))
        _apply(self.cached, at, data)

    def sync(self) -> None:
        for at, data in self.unsynced:
            _apply(self.durable, at, data)
        self.unsynced = []

    def lose(self, chance: Random, kept: float) -> None:
        for at, data in self.unsynced:
            if chance.random() < kept:
                _apply(self.durable, at, data)
            elif data is None:
                break
            elif (fate := chance.choice(("lost", "head", "tail"))) != "lost":
                middle = chance.choice([at, *_sectors(at, at + len(data)), at + len(data)])
                head, tail = (at, data[: middle - at]), (middle, data[middle - at :])
                _apply(self.durable, *(head if fate == "head" else tail))
        self.cached, self.unsynced = bytearray(self.durable), []


def _apply(to: bytearray, at: int, data: bytes | None) -> None:
    to.extend(bytes(max(0, at - len(to))))
    if data is None:
        del to[at:]
    else:
        to[at : at + len(data)] = data


@dataclass(eq=False, slots=True)
class _Open:
    disk: SimDisk
    path: str
    file: _File
    place: Place


class SimDisk:
    """One machine's; it outlives processes. `cuts`: the chance that a write takes two pieces, with time between them.
    `room_bytes`, `slow_s` of each call, and `failing`, the chance that a read, write or sync raises, may change."""

    def __init__(self, hub: Hub, name: str, *, cuts: float = 0.0) -> None:
        self.hub, self.cuts = hub, cuts
        self.room_bytes: int | None = None
        self.slow_s = self.failing = 0.0
        self.folder = SimPath(f"{ROOT}/{name}")
        self.folders = {str(self.folder)}
        self.files: dict[str, _File] = {}
        self.durable: dict[str, _File] = {}  # what of them a power cut finds
        self.opened: dict[int, _Open] = {}
        _DISKS[name] = self

    def died(self, place: Place) -> None:
        self.opened = {number: one for number, one in self.opened.items() if one.place is not place}

    def settle(self) -> None:
        """As half a minute does: all is on the platter."""
        for file in self.files.values():
            file.sync()
        self.durable = dict(self.files)

    def power_cut(self, writes: float | None = None, names: float | None = None) -> None:
        """Of a machine whose processes are dead. `writes`, `names`: the chance of a write, and of a file that was made
        or unlinked, to be kept; else drawn."""
        chance = self.hub.random
        writes = chance.choice(KEPT) if writes is None else writes
        names = chance.choice(KEPT) if names is None else names
        self.opened.clear()
        for name in sorted({*self.files, *self.durable}):
            now, before = self.files.pop(name, None), self.durable.get(name)
            if (file := now if now is before or chance.random() < names else before) is not None:
                file.lose(chance, writes)
                self.files[name] = file
        self.durable = dict(self.files)

    def contents(self) -> list[bytes]:
        """Of each file, as processes see them."""
        return [bytes(file.cached) for file in self.files.values()]

    def flip(self) -> bool:
        """Damage a bit of what is stored. False if nothing is."""
        chance = self.hub.random
        files = [file for _, file in sorted(self.files.items()) if file.cached]
        if files:
            (file,) = chance.choices(files, [len(file.cached) for file in files])
            at, bit = chance.randrange(len(file.cached)), 1 << chance.randrange(8)
            file.sync()
            for held in (file.cached, file.durable):
                held[at] ^= bit
        return bool(files)

    # What `SimOs` and `SimPath` ask for.

    def wait(self, delay_s: float) -> None:
        if delay_s and hasattr(getcurrent(), "actor"):
            self.hub.sleep(delay_s)

    def called(self, *, may_fail: bool = False) -> None:
        self.wait(self.slow_s)
        if may_fail and self.failing and self.hub.random.random() < self.failing:
            raise _error(errno.EIO)

    def find(self, path: str) -> _File:
        if path not in self.files:
            raise _error(errno.ENOENT, path)
        return self.files[path]

    def room_for(self, file: _File, end: int) -> int:
        """Up to where it may grow, of `end`."""
        if self.room_bytes is None or end <= len(file.cached):
            return end
        held = {*self.files.values(), *(one.file for one in self.opened.values())}
        room = self.room_bytes - sum(len(one.cached) for one in held)
        return min(end, len(file.cached) + max(room, 0))


def _error(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


def _sectors(start: int, end: int) -> range:
    """Where it may tear."""
    return range(start - start % SECTOR + SECTOR, end, SECTOR)


def _disk_of(path: str | os.PathLike[str]) -> tuple[SimDisk, str]:
    text = os.fspath(path)
    name = text.removeprefix(f"{ROOT}/").partition("/")[0]
    return _DISKS[name], text  # KeyError: a path of a real disk


def _opened(number: int) -> _Open:
    for one in _DISKS.values():
        if number in one.opened:
            return one.opened[number]
    raise _error(errno.EBADF)


def _stat(file: _File) -> os.stat_result:
    return os.stat_result((0o100600, 0, 0, 1, 0, 0, len(file.cached), 0, 0, 0))


class SimPath(PosixPath):
    __slots__ = ()

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        assert parents
        assert exist_ok
        one, _ = _disk_of(self)
        one.called()
        one.folders |= {str(path) for path in (self, *self.parents) if path.is_relative_to(one.folder)}

    def unlink(self, missing_ok: bool = False) -> None:
        one, path = _disk_of(self)
        one.called()
        if not missing_ok:
            one.find(path)
        one.files.pop(path, None)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        one, path = _disk_of(self)
        return _stat(one.find(path))

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        one, path = _disk_of(self)
        return path in one.files or path in one.folders

    def iterdir(self) -> Generator[SimPath, None, None]:
        yield from (self / name for name in SimOs().listdir(self))


for _name in {*dir(PosixPath)} - {*dir(PurePosixPath)} - {*vars(SimPath)}:  # it would touch real files
    if not _name.startswith("_"):
        setattr(SimPath, _name, property())


class SimOs:
    O_RDONLY, O_RDWR, O_CREAT, O_EXCL = os.O_RDONLY, os.O_RDWR, os.O_CREAT, os.O_EXCL
    O_CLOEXEC, O_DIRECTORY = os.O_CLOEXEC, os.O_DIRECTORY

    def open(self, at: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        one, path = _disk_of(at)
        one.called()
        if flags & os.O_CREAT and path not in one.folders:
            if flags & os.O_EXCL and path in one.files:
                raise _error(errno.EEXIST, path)
            if os.path.dirname(path) in one.folders:
                one.files.setdefault(path, _File())
        number = next(_NUMBERS)
        one.opened[number] = _Open(one, path, _File() if path in one.folders else one.find(path), one.hub.here)
        return number

    def close(self, number: int) -> None:
        """Never waits. At the end of a run those do it too whose process has died."""
        was_open = [one.opened.pop(number, None) for one in _DISKS.values()]
        if not any(was_open) and not any(one.hub.is_over for one in _DISKS.values()):
            raise _error(errno.EBADF)

    def listdir(self, at: str | os.PathLike[str]) -> list[str]:
        """In an order that nobody may count on."""
        one, folder = _disk_of(at)
        one.called()
        if folder not in one.folders:
            raise _error(errno.ENOENT, folder)
        names = sorted(os.path.basename(path) for path in one.files if os.path.dirname(path) == folder)
        one.hub.random.shuffle(names)
        return names

    def fstat(self, number: int) -> os.stat_result:
        return _stat(_opened(number).file)

    def pread(self, number: int, length: int, at: int) -> bytes:
        one = _opened(number)
        one.disk.called(may_fail=True)
        return bytes(one.file.cached[at : at + length])

    def preadv(self, number: int, into: Sequence[memoryview], at: int) -> int:
        data = left = self.pread(number, sum(map(len, into)), at)
        for part in into:
            piece, left = left[: len(part)], left[len(part) :]
            part[: len(piece)] = piece
        return len(data)

    def pwritev(self, number: int, parts: Sequence[memoryview | bytes], at: int) -> int:
        data, one, chance = b"".join(parts), _opened(number), _opened(number).disk.hub.random
        one.disk.called(may_fail=True)
        if data and not (data := data[: max(0, one.disk.room_for(one.file, at + len(data)) - at)]):
            raise _error(errno.ENOSPC)
        middle = 0
        if (sectors := _sectors(at, at + len(data))) and chance.random() < one.disk.cuts:
            middle = chance.choice(sectors) - at
            one.file.change(at, data[:middle])
            one.disk.wait(chance.uniform(*CUT_S))
        one.file.change(at + middle, data[middle:])
        return len(data)

    def ftruncate(self, number: int, size: int) -> None:
        one = _opened(number)
        one.disk.called(may_fail=True)
        one.file.change(size, None)

    def fsync(self, number: int) -> None:
        one = _opened(number)
        files, durable = one.disk.files, one.disk.durable
        one.disk.called(may_fail=True)
        one.file.sync()
        for path in {*files, *durable}:
            if files.get(path) is one.file or os.path.dirname(path) == one.path:
                durable.pop(path, None)
                if path in files:
                    durable[path] = files[path]

    fdatasync = fsync


class SimFcntl:
    LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

    def flock(self, number: int, how: int) -> None:
        assert how == fcntl.LOCK_EX | fcntl.LOCK_NB
        one = _opened(number)
        if one.file.locked_by is not one and one.file.locked_by in one.disk.opened.values():
            raise _error(errno.EWOULDBLOCK)
        one.file.locked_by = one


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """`put`: such as a test's `monkeypatch.setattr`."""
    for module, name, made in ((disk, "os", SimOs()), (segments, "os", SimOs()), (disk, "fcntl", SimFcntl())):
        put(module, name, made)
