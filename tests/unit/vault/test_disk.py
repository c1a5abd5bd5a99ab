"""The disk tier: what was stored comes back as it was or not at all, whatever happens to its files."""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from disk_blocks import ROOT, block, payload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfleet.vault.disk import disk
from kvfleet.vault.disk.disk import DiskStore
from kvfleet.vault.disk.segments import MAGIC, PREFIX_BYTES, read_prefix, record_start
from kvproto.dataplane.block import BlockCodec, BlockHeader
from tests.support.waiting import LIMIT_S

REPOSITORY = Path(__file__).parents[3]
WRITER = Path(__file__).with_name("disk_blocks.py")
ROOM = 10_000_000
INTO = memoryview(bytearray(200_000))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "vault"


@pytest.fixture
def store(folder: Path) -> Iterator[DiskStore]:
    made = DiskStore(folder, ROOM, 20_000)
    assert made.open() == []
    yield made
    made.close()


def fill(store: DiskStore, numbers: range) -> list[BlockHeader]:
    headers = []
    for number in numbers:
        header, data = block(number)
        store.append(header, data)
        headers.append(header)
    return headers


def reopened(store: DiskStore, folder: Path, max_bytes: int = ROOM) -> tuple[DiskStore, list[BlockHeader]]:
    store.close()
    again = DiskStore(folder, max_bytes, 20_000)
    return again, again.open()


def is_whole(store: DiskStore, number: int) -> bool:
    """Whether the block is there; it must then be what was stored."""
    header, data = block(number)
    found = store.read(header.hash, INTO)
    if found is None:
        assert not store.has(header.hash), "what cannot be read is there no more"
        return False
    assert found == header
    assert INTO[: found.length] == data
    return True


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


# ---------------------------------------------------------------------------------------------- blocks


def test_blocks_come_back_as_they_were(store: DiskStore, folder: Path) -> None:
    headers = fill(store, range(60))
    assert len(store) == 60
    assert len(segments(folder)) > 3
    for _ in range(2):
        assert all(store.has(header.hash) for header in headers)
        assert all(is_whole(store, number) for number in range(60))
        assert not store.has(block(60)[0].hash)
        assert store.read(block(60)[0].hash, INTO) is None
        assert store.take_lost() == []
        store, found = reopened(store, folder)
        assert found == headers
    fill(store, range(60, 70))
    store, found = reopened(store, folder)
    assert len(found) == 70
    store.check_integrity()
    store.close()


def test_a_header_comes_back_with_all_its_fields(store: DiskStore, folder: Path) -> None:
    header, data = block(1)
    odd = replace(header, codec=BlockCodec.INT8, lossy=True, snr_db=44.25, ids=bytes(4 * 1024)).sealed(data)
    store.append(odd, memoryview(bytearray(data)))
    assert store.read(odd.hash, INTO) == odd
    store, found = reopened(store, folder)
    assert found == [odd]
    assert store.read(odd.hash, INTO) == odd
    store.close()


def test_what_is_there_is_not_stored_twice(store: DiskStore) -> None:
    header, data = block(1)
    store.append(header, data)
    before = store.bytes_used
    store.append(header, data)
    assert store.bytes_used == before


def test_a_new_process_goes_on_in_the_last_segment(store: DiskStore, folder: Path) -> None:
    for number in range(5):
        fill(store, range(number, number + 1))
        store, found = reopened(store, folder)
        assert len(found) == number + 1
    assert len(segments(folder)) < 3
    store.close()


def test_parents_come_first_though_leaves_were_stored_first(store: DiskStore, folder: Path) -> None:
    chance = random.Random(4)
    chains, parent = [], ROOT
    for number in range(50):
        chains.append(block(number, parent if number % 10 else ROOT))
        parent = chains[-1][0].hash
    forked = [block(100 + at, chains[at][0].hash) for at in (3, 17, 33)]
    missing = chains.pop(25)
    for header, data in chance.sample(chains + forked, len(chains + forked)):
        store.append(header, data)
    store, found = reopened(store, folder)
    at = {header.hash: place for place, header in enumerate(found)}
    assert len(at) == 52
    assert all(at[header.parent] < at[header.hash] for header in found if header.parent in at)
    assert sum(header.parent not in at for header in found) == 6
    assert missing[0].hash not in at
    store.close()


@pytest.mark.parametrize("size", [0, 1, 4_999])
def test_buffers_of_a_wrong_size(store: DiskStore, size: int) -> None:
    header, data = block(1, payload=bytes(5_000))
    with pytest.raises(ValueError, match="5000"):
        store.append(header, bytes(size))
    assert not store.has(header.hash)
    store.append(header, data)
    with pytest.raises(ValueError, match="5000"):
        store.read(header.hash, memoryview(bytearray(size)))
    assert store.read(header.hash, memoryview(bytearray(5_000))) == header


# ---------------------------------------------------------------------------------------------- erasing


def test_erased_blocks_do_not_come_back(store: DiskStore, folder: Path) -> None:
    headers = fill(store, range(40))
    gone = {3, 4, 17, 39}
    store.forget([headers[number].hash for number in gone] + [headers[3].hash, b"never seen befor"])
    assert store.counts.erased == 4
    everything = b"".join(path.read_bytes() for path in segments(folder))
    for number, header in enumerate(headers):
        assert (payload_of(number) in everything) == (header.ids in everything) == (number not in gone)
    for _ in range(2):
        assert [number for number in range(40) if not is_whole(store, number)] == sorted(gone)
        store.check_integrity()
        store, found = reopened(store, folder)
        assert len(found) == 36
    assert store.take_lost() == [], "the caller knows"
    store.append(*block(3))
    store, _ = reopened(store, folder)
    assert is_whole(store, 3)
    store.close()


def test_what_is_erased_gives_its_space_back_with_its_segment(store: DiskStore, folder: Path) -> None:
    headers = fill(store, range(60))
    before = len(segments(folder))
    store.forget(header.hash for header in headers[:30])
    assert len(segments(folder)) < before
    store.check_integrity()
    store.forget(header.hash for header in headers)
    assert len(store) == 0
    assert len(segments(folder)) == 1, "the one that is appended to"
    store, found = reopened(store, folder)
    assert found == []
    assert segments(folder) == []
    store.close()


def test_an_erasure_cut_short_is_finished_by_the_next_process(
    store: DiskStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = fill(store, range(3))
    gone, data = headers[1], payload_of(1)
    whole = os.pwritev
    with monkeypatch.context() as patch:  # the mark is written, nothing after it
        patch.setattr(os, "pwritev", lambda file, parts, at: fail() if is_zero(parts) else whole(file, parts, at))
        with pytest.raises(OSError):
            store.forget([gone.hash])
    assert not store.has(gone.hash)
    assert len(store) == 2
    store.check_integrity()
    (path,) = segments(folder)
    assert data in path.read_bytes()
    store, found = reopened(store, folder)
    assert found == [headers[0], headers[2]]
    assert data not in path.read_bytes()
    assert gone.ids not in path.read_bytes()
    store.check_integrity()
    store.close()


def fail(*_: object) -> int:
    raise OSError(5, "Input/output error")


def is_zero(parts: list[memoryview]) -> bool:
    return not any(map(any, parts))


def test_of_two_records_of_one_block_the_later_counts(store: DiskStore, folder: Path) -> None:
    """As a power cut may leave it, if an erasure had not reached the disk."""
    first, old = block(1)
    second, new = block(1, payload=b"other bytes")
    store.append(first, old)
    fill(store, range(2, 20))
    store.close()
    path = segments(folder)[-1]
    with path.open("ab") as file:
        file.write(record_start(second) + new)
    store, found = reopened(store, folder)
    assert [header for header in found if header.hash == first.hash] == [second]
    assert store.read(first.hash, INTO) == second
    store.forget([first.hash])
    store, found = reopened(store, folder)
    assert not store.has(first.hash)
    assert len(found) == 18
    store.close()


# ---------------------------------------------------------------------------------------------- bounds


def test_the_oldest_make_room_and_are_told(folder: Path) -> None:
    store = DiskStore(folder, 100_000, 20_000)
    store.open()
    there: dict[bytes, int] = {}
    for number in range(300):
        header, data = block(number)
        store.append(header, data)
        there[header.hash] = number
        lost = store.take_lost()
        assert {there.pop(gone) for gone in lost} <= set(range(number))
        store.check_integrity()
        assert sum(path.stat().st_size for path in segments(folder)) == store.bytes_used <= 100_000
        assert len(store) == len(there)
    assert store.counts.evicted == 300 - len(there)
    assert min(there.values()) == 300 - len(there), "the newest are there"
    assert store.bytes_used > 80_000
    assert all(is_whole(store, number) for number in there.values())
    store, found = reopened(store, folder, 100_000)
    assert {header.hash for header in found} == set(there)
    store.close()


def test_a_smaller_bound_holds_from_the_next_start_on(store: DiskStore, folder: Path) -> None:
    fill(store, range(60))
    store, found = reopened(store, folder, 50_000)
    assert store.bytes_used <= 50_000
    assert 0 < len(found) == len(store) < 60
    assert store.take_lost() == [], "nobody knew of them"
    assert is_whole(store, 59)
    store.close()


def test_a_block_larger_than_the_store(folder: Path) -> None:
    store = DiskStore(folder, 10_000, 20_000)
    store.open()
    fill(store, range(3))
    with pytest.raises(OSError, match="too large"):
        store.append(*block(9, payload=bytes(10_000)))
    assert len(store) == 3
    store.append(*block(10, payload=bytes(9_500)))
    assert len(store) == 1
    assert len(store.take_lost()) == 3
    with pytest.raises(OSError, match="too large"):
        store.append(replace(block(11)[0], ids=bytes(4_000_000)), payload_of(11))
    store.check_integrity()
    store.close()


@pytest.mark.parametrize(("most", "segment"), [(0, 1), (-1, 1), (1, 0)])
def test_bounds_of_nothing(folder: Path, most: int, segment: int) -> None:
    with pytest.raises(ValueError, match="room"):
        DiskStore(folder, most, segment)


def test_a_full_disk_stores_nothing_and_breaks_nothing(store: DiskStore, folder: Path) -> None:
    """The kernel cuts the write short and then refuses, as on a full disk."""
    fill(store, range(4))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.bytes_used + 2_000, limits[1]))
    try:
        for number in (100, 101):
            with pytest.raises(OSError):
                store.append(*block(number, payload=bytes(9_000)))
            store.check_integrity()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert all(is_whole(store, number) for number in range(4))
    assert not store.has(block(100)[0].hash)
    fill(store, range(4, 6))
    store, found = reopened(store, folder)
    assert len(found) == 6
    assert store.counts.torn == 0
    store.close()


def test_what_could_not_be_taken_back_is_cut_off_later(
    store: DiskStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, range(4))
    whole = os.pwritev
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail)
        patch.setattr(os, "pwritev", lambda file, parts, at: whole(file, parts, at) if len(parts) == 1 else fail())
        with segments(folder)[-1].open("ab") as file:
            file.write(b"half of it")
        with pytest.raises(OSError):
            store.append(*block(9))
    fill(store, range(4, 5))
    store, found = reopened(store, folder)
    assert len(found) == 5
    assert all(is_whole(store, number) for number in range(5))
    store.check_integrity()
    store.close()


# ---------------------------------------------------------------------------------------------- the folder


def test_files_are_for_their_owner_alone(store: DiskStore, folder: Path) -> None:
    fill(store, range(30))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {0o600}


def test_a_folder_has_one_store(store: DiskStore, folder: Path) -> None:
    header, data = block(1)
    store.append(header, data)
    with pytest.raises(BlockingIOError, match="another vault"):
        DiskStore(folder, ROOM).open()
    command = [sys.executable, str(WRITER), str(folder), "0", "400000", "60000"]
    other = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert other.returncode == 1
    assert "used by another vault" in other.stderr
    assert str(folder) in other.stderr
    assert is_whole(store, 1), "the other one touched nothing"
    again, found = reopened(store, folder)
    assert found == [header]
    again.close()


def test_a_closed_store_has_nothing_and_takes_nothing(folder: Path) -> None:
    store = DiskStore(folder, ROOM)
    for _ in range(2):
        header, data = block(1)
        assert not store.has(header.hash)
        assert store.read(header.hash, INTO) is None
        store.forget([header.hash])
        with pytest.raises(OSError, match="not open"):
            store.append(header, data)
        store.open()
        store.append(header, data)
        store.close()
        store.close()


def test_a_read_only_folder() -> None:
    """Root may write everywhere, so it is somebody else here for a while."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65_534)
        try:
            with pytest.raises(PermissionError, match=made):
                DiskStore(folder, ROOM).open()
        finally:
            os.seteuid(user)
            folder.chmod(0o700)
        assert not any(folder.iterdir())


@pytest.mark.parametrize("where", ["/proc/vault", "/dev/null/vault"])
def test_a_place_where_no_folder_can_be(where: str) -> None:
    with pytest.raises(OSError, match="vault"):
        DiskStore(Path(where), ROOM).open()


def test_files_of_others_are_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True)
    names = ["notes.txt", "segment-1", "segment-0000000001.bak", "segment-00000000011", "segment-\u0661\u0661"]
    for name in names:
        (folder / name).write_text(name)
    store = DiskStore(folder, 50_000, 20_000)
    assert store.open() == []
    fill(store, range(100))
    assert all((folder / name).read_text() == name for name in names)
    store.close()


# ---------------------------------------------------------------------------------------------- damage


def damaged_store(folder: Path) -> tuple[int, list[Path]]:
    """A folder with 30 blocks in several segments, of which one was erased; how many bytes that are."""
    store = DiskStore(folder, ROOM, 20_000)
    store.open()
    headers = fill(store, range(30))
    store.forget([headers[7].hash])
    store.close()
    files = segments(folder)
    return sum(path.stat().st_size for path in files), files


def located(files: list[Path], at: int) -> tuple[Path, int]:
    for path in files:
        size = path.stat().st_size
        if at < size:
            return path, at
        at -= size
    raise AssertionError


def check_what_is_left(folder: Path, least: int) -> DiskStore:
    """Opening never fails; what is there is right, or found out when it is read; and a second start agrees."""
    store = DiskStore(folder, ROOM, 20_000)
    assert set(store.open()) <= {block(number)[0] for number in range(30) if number != 7}
    whole = [number for number in range(30) if is_whole(store, number)]
    assert len(whole) >= least
    assert len(store) == len(whole)
    store.check_integrity()
    fill(store, range(30, 33))
    store.close()
    again = DiskStore(folder, ROOM, 20_000)
    again.open()
    assert [number for number in range(33) if is_whole(again, number)] == [*whole, 30, 31, 32]
    assert again.counts == disk.DiskCounts()
    again.check_integrity()
    return store


SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW
@given(where=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=6))
def test_bits_flipped_anywhere(tmp_path_factory: pytest.TempPathFactory, where: list[tuple[float, int]]) -> None:
    folder = tmp_path_factory.mktemp("vault")
    total, files = damaged_store(folder)
    for share, bit in where:
        path, at = located(files, int(share * total))
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << bit
        path.write_bytes(data)
    check_what_is_left(folder, 0 if len(where) > 1 else 15).close()


@SLOW
@given(share=st.floats(0, 1, exclude_max=True))
def test_files_truncated_anywhere(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    folder = tmp_path_factory.mktemp("vault")
    total, files = damaged_store(folder)
    path, at = located(files, int(share * total))
    os.truncate(path, at)
    check_what_is_left(folder, 15).close()


@SLOW
@given(share=st.floats(0, 1, exclude_max=True), junk=st.binary(min_size=1, max_size=3_000))
def test_junk_written_anywhere(tmp_path_factory: pytest.TempPathFactory, share: float, junk: bytes) -> None:
    folder = tmp_path_factory.mktemp("vault")
    total, files = damaged_store(folder)
    path, at = located(files, int(share * total))
    with path.open("r+b") as file:
        file.seek(at)
        file.write(junk)
    check_what_is_left(folder, 10).close()


def record(path: Path, which: int) -> tuple[int, int, int]:
    """Offsets in a segment: of a record's prefix, header and payload."""
    data, at = path.read_bytes(), len(MAGIC)
    while True:
        prefix = read_prefix(data[at : at + PREFIX_BYTES])
        assert prefix is not None
        if which == 0:
            return at, at + PREFIX_BYTES, at + PREFIX_BYTES + prefix.header_bytes
        at, which = at + prefix.record_bytes, which - 1


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("part", ["prefix", "header", "payload"])
def test_damage_in_the_middle_is_counted_and_costs_as_little_as_it_can(folder: Path, part: str) -> None:
    store = DiskStore(folder, ROOM, 1_000_000)
    store.open()
    fill(store, range(10))
    store.close()
    (path,) = segments(folder)
    flip(path, record(path, 4)[("prefix", "header", "payload").index(part)] + 1)
    store, found = reopened(store, folder)
    if part == "prefix":
        assert len(found) == 4, "where the next one begins cannot be known"
        assert (store.counts.torn, store.counts.damaged) == (1, 0)
        assert store.counts.torn_bytes > 10_000
        assert path.stat().st_size == store.bytes_used
    elif part == "header":
        assert len(found) == 9
        assert (store.counts.torn, store.counts.damaged) == (0, 1)
        assert payload_of(4) not in path.read_bytes(), "nobody could erase it later"
    else:
        assert len(found) == 10, "payloads are not read"
        assert store.counts.damaged == 0
        assert not is_whole(store, 4)
        assert store.counts.damaged == 1
        assert store.take_lost() == [block(4)[0].hash]
        assert store.take_lost() == []
        store.append(*block(4))
        assert is_whole(store, 4), "a good copy is taken"
    store.check_integrity()
    store, again = reopened(store, folder)
    assert store.counts == disk.DiskCounts()
    assert len(again) == {"prefix": 4, "header": 9, "payload": 10}[part]
    store.close()


def test_damage_while_it_is_open(store: DiskStore, folder: Path) -> None:
    headers = fill(store, range(30))
    first, second = segments(folder)[:2]
    for at in (record(first, 0)[0] + 5, record(first, 1)[1] + 5, record(first, 2)[2]):
        flip(first, at)
    os.truncate(second, 1_000)
    whole = [number for number in range(30) if is_whole(store, number)]
    assert store.take_lost() == [headers[number].hash for number in range(30) if number not in whole]
    assert len(whole) > 10
    assert not {0, 1, 2} & set(whole)
    fill(store, range(30, 60))
    assert all(is_whole(store, number) for number in range(30, 60))
    store, _ = reopened(store, folder)
    assert [number for number in range(60) if is_whole(store, number)] == [*whole, *range(30, 60)]
    store.check_integrity()
    store.close()


def test_a_segment_that_vanished(store: DiskStore, folder: Path) -> None:
    headers = fill(store, range(30))
    segments(folder)[0].unlink()
    gone = [number for number in range(30) if not is_whole(store, number)]
    assert gone == list(range(len(gone)))
    assert store.take_lost() == [headers[number].hash for number in gone]
    assert store.counts.failed > 0
    store.close()
    assert len(store.open()) == 30 - len(gone)


def test_too_many_open_files_cost_no_block(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (header,) = fill(store, range(1))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert store.read(header.hash, INTO) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert store.counts.failed == 1
    assert is_whole(store, 0)


# ---------------------------------------------------------------------------------------------- kill -9


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "libs"), str(REPOSITORY)))}


def said(lines: list[str], word: str) -> set[int]:
    return {int(line.split()[1]) for line in lines if line.startswith(word) and line.endswith("\n")}


def test_kill_9_at_any_moment(folder: Path) -> None:
    """What a process said is stored is there, what it said is erased is not, over several deaths and restarts."""
    chance = random.Random(5)
    stored: set[int] = set()
    erasing: set[int] = set()
    erased: set[int] = set()
    first, torn = 0, 0
    for _ in range(8):
        command = [sys.executable, str(WRITER), str(folder), str(first), "400000", "60000"]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            time.sleep(chance.uniform(0, 0.15))
            process.kill()
            lines += process.stdout.readlines()
        new = said(lines, "stored")
        assert new, "it wrote"
        stored |= new
        erasing |= said(lines, "erasing")
        erased |= said(lines, "erased")
        first = max(stored) + 2  # one may be there that it did not come to tell

        store = DiskStore(folder, 400_000, 60_000)
        found = {header.hash for header in store.open()}
        torn += store.counts.torn
        assert store.counts.damaged == store.counts.dropped == 0
        there = {number for number in range(first) if is_whole(store, number)}
        assert len(there) == len(found)
        oldest = min(there - erasing)
        assert store.bytes_used <= 400_000
        assert there >= {number for number in stored - erasing if number >= oldest}
        assert not there & erased
        assert len(there) > 20
        store.check_integrity()
        store.close()
    assert erased
    assert max(stored) > 300, "older ones had to make room"
    assert torn <= 8
