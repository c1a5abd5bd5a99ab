"""A store above a real disk: what memory has no room for is written ahead, comes back, and survives a restart."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvfleet.vault.disk.disk import DiskStore
from kvfleet.vault.disk.disk_thread import DiskThread
from kvfleet.vault.store.block_table import bytes_for
from kvfleet.vault.store.store import VaultStore
from tests.support.kv_blocks import OTHER_ROOT, ROOT, Block, block, chain, hashes
from tests.support.waiting import LIMIT_S, wait_until

ONE = bytes_for(chain(1)[0].header)
DISK_BYTES = 4 * 2**20


class Rig:
    """A store and its disk; opened again it is what a restart finds."""

    def __init__(self, folder: Path, blocks: int = 16, disk_bytes: int = DISK_BYTES) -> None:
        self.disk = DiskStore(folder, disk_bytes)
        found = self.disk.open()
        self.thread = DiskThread(self.disk)
        self.store = VaultStore(blocks * ONE, self.thread, on_disk=found)
        self.thread.start(self.store)

    def put(self, *blocks: Block) -> list[bool]:
        done = []
        for one in blocks:
            buffer = self.store.reserve(one.header)
            if buffer is None:
                done.append(False)
                continue
            buffer[:] = one.payload
            done.append(self.store.commit(one.header, buffer))
        return done

    def put_calmly(self, *blocks: Block) -> None:
        """So that the disk keeps pace."""
        for one in blocks:
            assert self.put(one) == [True]
            wait_until(lambda: self.store.table.room >= self.store._spare_bytes)

    def get(self, asked: Sequence[Block], root: bytes = ROOT, exact: bool = False) -> list[bytes | None]:
        served = self.store.get(root, hashes(asked), exact)
        found = [None if one is None else bytes(one[1]) for one in served.blocks]
        served.release()
        return found

    def is_on_disk_alone(self, one: Block) -> bool:
        return one.hash in self.store.table.on_disk and one.hash not in self.store.table.resident

    def close(self, last_words_s: float = 0.0) -> None:
        """And the folder has what the store says it has."""
        self.thread.close(last_words_s)
        self.store.check_integrity()
        assert self.store.table.locked_bytes == 0
        assert {header.hash: header for header in self.disk.open()} == self.store.table.on_disk
        self.disk.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "disk")
    yield rig
    rig.close()


def singles(count: int) -> list[Block]:
    """Chains of one block each."""
    return [block(ROOT, 10_000 + 4 * number) for number in range(count)]


def payloads(blocks: Sequence[Block]) -> list[bytes]:
    return [one.payload for one in blocks]


def test_what_memory_has_no_room_for_comes_back_from_disk(rig: Rig) -> None:
    blocks = chain(64)
    rig.put_calmly(*blocks)
    store = rig.store
    assert len(store.table.resident) < 17
    assert store.table.held_blocks == 64
    assert store.has(ROOT, hashes(blocks), True) == [True] * 64
    for start in range(0, 64, 8):
        assert rig.get(blocks[start : start + 8]) == payloads(blocks[start : start + 8])
    assert store.counters.disk_hits_total >= 40
    assert store.counters.dropped_total == 0
    assert [change.hash for change in store.take_changes()] == hashes(blocks), "to the fleet a block moved nowhere"


def test_a_restart_finds_what_was_written_and_what_was_in_memory_as_far_as_there_was_time(tmp_path: Path) -> None:
    blocks = chain(40)
    rig = Rig(tmp_path)
    rig.put_calmly(*blocks)
    rig.close(last_words_s=5.0)
    again = Rig(tmp_path)
    assert len(again.store.table.resident) == 0
    assert [change.hash for change in again.store.take_changes()] == hashes(blocks), "told of, parents first"
    assert again.get(blocks[20:30]) == payloads(blocks[20:30])
    again.close()


def test_a_restart_after_a_kill_finds_what_was_written(tmp_path: Path) -> None:
    blocks = chain(40)
    rig = Rig(tmp_path)
    rig.put_calmly(*blocks)
    rig.close(last_words_s=0.0)
    again = Rig(tmp_path)
    held = again.store.has(ROOT, hashes(blocks), False)
    assert 20 < sum(held) < 40
    for one, there in zip(blocks, held, strict=True):
        assert again.get([one]) == ([one.payload] if there else [None])
    again.close()


def test_a_disk_that_is_slow_holds_up_no_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    append = DiskStore.append

    def slow(self: DiskStore, *args: object) -> None:
        go_on.wait(2 * LIMIT_S)
        append(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskStore, "append", slow)
    rig = Rig(tmp_path)
    blocks = singles(200)
    began = time.monotonic()
    assert rig.put(*blocks) == [True] * 200
    assert time.monotonic() - began < 5
    assert rig.store.counters.dropped_total > 150, "counted"
    go_on.set()
    rig.close()


def test_blocks_that_arrive_when_nothing_could_be_written_are_written(rig: Rig) -> None:
    """The disk was woken for room while all of them were still arriving, and found nothing."""
    blocks = singles(15)
    buffers = [rig.store.reserve(one.header) for one in blocks]
    wait_until(lambda: not rig.thread._woken and not rig.thread._spilling)
    assert rig.store.table.room < rig.store._spare_bytes
    for one, buffer in zip(blocks, buffers, strict=True):
        assert buffer is not None
        buffer[:] = one.payload
        assert rig.store.commit(one.header, buffer)
    wait_until(lambda: rig.store.table.room >= rig.store._spare_bytes)


def test_a_disk_that_is_full_or_broken_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: DiskStore, *args: object) -> None:
        raise OSError(28, os.strerror(28))

    rig = Rig(tmp_path)
    monkeypatch.setattr(DiskStore, "append", broken)
    blocks = singles(60)
    assert rig.put(*blocks) == [True] * 60
    wait_until(lambda: rig.thread.failures_total)
    assert rig.get(blocks[-8:]) == payloads(blocks[-8:])
    assert len(rig.store.table.on_disk) == 0
    rig.close(last_words_s=1.0)


def test_a_fault_of_the_disk_thread_ends_neither_it_nor_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(self: DiskStore, *args: object) -> None:
        raise ZeroDivisionError

    rig = Rig(tmp_path)
    rig.put_calmly(*chain(30))
    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "append", faulty)
        rig.put(*chain(20, first_id=1000))
        wait_until(lambda: rig.thread._paused_until)
        patched.setattr(DiskStore, "read", faulty)
        gone = next(one for one in chain(30) if rig.is_on_disk_alone(one))
        with pytest.raises(ZeroDivisionError):
            rig.get([gone])
        rig.store.check_integrity()
    assert rig.get([gone]) == [gone.payload]
    rig.close()


def test_a_block_that_the_disk_did_not_keep_is_a_miss_and_told(rig: Rig, tmp_path: Path) -> None:
    blocks = chain(40)
    rig.put_calmly(*blocks)
    rig.store.take_changes()
    away = [one for one in blocks if rig.is_on_disk_alone(one)][-1]
    for path in (tmp_path / "disk").glob("*"):
        data = bytearray(path.read_bytes())
        at = data.find(away.payload[:32])
        if at >= 0:
            data[at + 5] ^= 1
            path.write_bytes(data)
            break
    else:
        pytest.fail("no segment has it")
    assert rig.get([away]) == [None]
    assert rig.store.counters.misses["unreadable"] == 1
    assert [(change.removed, change.hash) for change in rig.store.take_changes()] == [(True, away.hash)]
    assert rig.put(away) == [True]
    assert rig.get([away]) == [away.payload]


def test_what_is_erased_does_not_come_back_with_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    blocks = chain(40)
    rig.put_calmly(*blocks)
    assert rig.store.erase(OTHER_ROOT, hashes(blocks)) == 0
    assert rig.store.erase(ROOT, hashes(blocks[10:])) == 30
    assert rig.get(blocks) == [*payloads(blocks[:10]), *[None] * 30]
    rig.close(last_words_s=5.0)
    again = Rig(tmp_path)
    assert again.get(blocks) == [*payloads(blocks[:10]), *[None] * 30]
    again.close()
    assert not any(blocks[20].payload[:64] in path.read_bytes() for path in tmp_path.glob("*"))


def test_a_block_that_the_disk_lost_without_a_word_is_a_miss_and_told(rig: Rig) -> None:
    blocks = chain(40)
    rig.put_calmly(*blocks)
    rig.store.take_changes()
    away = next(one for one in blocks if rig.is_on_disk_alone(one))
    rig.thread.forget([away.hash])
    assert rig.get([away]) == [None]
    assert [(change.removed, change.hash) for change in rig.store.take_changes()] == [(True, away.hash)]


def test_another_version_than_was_looked_up_is_not_that_block(rig: Rig) -> None:
    exact = block(ROOT, 0)
    rig.put_calmly(exact, *chain(40, first_id=100))
    assert rig.is_on_disk_alone(exact)
    target = memoryview(bytearray(2048))
    assert rig.thread.read(exact.header, target[:1024])
    assert target[:1024] == exact.payload
    assert not rig.thread.read(block(ROOT, 0, lossy=True, size=2048).header, target)
    assert not rig.thread.read(block(ROOT, 0, lossy=True, size=300).header, target[:300])
    assert rig.get([exact]) == [exact.payload]


def test_erased_while_it_is_read_from_disk(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = chain(40)
    rig.put_calmly(*blocks)
    away = [one for one in blocks if rig.is_on_disk_alone(one)]
    first = min(at for at, one in enumerate(blocks) if one is away[0])
    gate = Gate(monkeypatch, "read")
    found: list[list[bytes | None]] = []
    asking = threading.Thread(target=lambda: found.append(rig.get([away[0]])))
    asking.start()
    gate.wait()
    erasing = threading.Thread(target=rig.store.erase, args=(ROOT, hashes(blocks[first:])))
    erasing.start()
    wait_until(lambda: away[0].hash not in rig.store.table.on_disk)
    gate.open()
    asking.join(LIMIT_S)
    erasing.join(LIMIT_S)
    assert found == [[None]]
    assert rig.get(blocks[first:]) == [None] * (40 - first)


def test_erased_while_it_is_written_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, blocks = Rig(tmp_path), singles(16)
    gate = Gate(monkeypatch, "append")
    rig.put(*blocks)
    gate.wait()
    (entry,) = rig.store.table._pinned
    assert rig.store.erase(ROOT, [entry.header.hash]) == 1
    gate.open()
    wait_until(lambda: not rig.store.table._pinned)
    rig.close()
    again = Rig(tmp_path)
    assert not any(again.store.has(ROOT, [entry.header.hash], False))
    again.close()


class Gate:
    """Holds up the disk's thread in one of its methods, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()
        original = getattr(DiskStore, method)

        def held_up(disk: DiskStore, *args: object) -> object:
            self._reached.set()
            assert self._opened.wait(2 * LIMIT_S)
            return original(disk, *args)

        monkeypatch.setattr(DiskStore, method, held_up)

    def wait(self) -> None:
        assert self._reached.wait(LIMIT_S)

    def open(self) -> None:
        self._opened.set()


def test_the_disk_is_bounded_and_what_it_gives_up_is_told(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk_bytes=64 * 1024)
    blocks = chain(200)
    rig.put_calmly(*blocks)
    held = {change.hash for change in rig.store.take_changes() if not change.removed}
    assert len(held) == 200
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 64 * 1024
    assert rig.store.table.held_blocks < 100
    assert rig.store.counters.disk_evictions_total > 100
    rig.close()


def test_an_exact_block_replaces_a_lossy_one_on_disk_too(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    lossy, exact = block(ROOT, 0, lossy=True, size=1024), block(ROOT, 0)
    rig.put_calmly(lossy, *chain(40, first_id=100))
    assert rig.store.table.on_disk[lossy.hash].lossy
    assert rig.get([lossy], exact=True) == [None]
    assert rig.put(exact) == [True]
    rig.put_calmly(*chain(40, first_id=500))
    assert not rig.store.table.on_disk[exact.hash].lossy
    assert rig.put(lossy) == [False]
    assert rig.get([exact], exact=True) == [exact.payload]
    rig.close()


def test_from_disk_into_memory_that_is_all_in_use(tmp_path: Path) -> None:
    rig = Rig(tmp_path, blocks=8)
    blocks = chain(16)
    rig.put_calmly(*blocks)
    held = [one for one in blocks if one.hash in rig.store.table.resident]
    away = [one for one in blocks if one not in held]
    served = rig.store.get(ROOT, hashes([*held, *away]), False)
    assert sum(one is not None for one in served.blocks) == 8
    assert rig.store.counters.misses["no_room"] == 8
    served.release()
    assert rig.get(away[:4]) == payloads(away[:4])
    rig.close()


def test_many_threads_above_a_disk(tmp_path: Path) -> None:
    """Whatever comes from wherever is what was put; in the end memory, disk and what was told agree."""
    rig = Rig(tmp_path, blocks=10, disk_bytes=48 * 1024)
    forest = [*chain(40), *chain(20, first_id=400), *chain(20, root=OTHER_ROOT)]
    lossy = [block(one.header.parent, 4 * at, size=300, lossy=True) for at, one in enumerate(forest[:40])]
    by_header = {one.header: one for one in (*forest, *lossy)}
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(250):
                start = chance.randrange(len(forest) - 4)
                asked, root = forest[start : start + 4], chance.choice([ROOT, ROOT, OTHER_ROOT])
                match chance.randrange(8):
                    case 0:
                        rig.store.erase(root, hashes(asked))
                    case 1 | 2 | 3:
                        served = rig.store.get(root, hashes(asked), chance.random() < 0.5)
                        for one in served.blocks:
                            if one is not None:
                                assert one[0].root == root
                                assert bytes(one[1]) == by_header[one[0]].payload
                        served.release()
                    case _:
                        time.sleep(0.0005)  # so that the disk keeps pace, mostly
                        rig.put(*(chance.choice([asked, lossy[start : start + 4]])))
                assert rig.store.table.memory.used_bytes <= rig.store.table.memory.max_bytes
        except BaseException as error:  # noqa: BLE001 - a thread's: the test raises it
            failures.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    assert failures == []
    counters = rig.store.counters
    assert min(counters.spilled_total, counters.disk_hits_total, counters.erased_total) > 0
    rig.close()
