"""Blocks between a GPU's pool and the host, in batches: every byte lands where it should, and nothing is still under
way when it must not be. Without a GPU a stand-in makes each copy as late as a GPU may: when its mark is waited for."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvcpu.blocks import KvShape
from kvfleet.worker.model.gpu import gpu_memory as module
from kvfleet.worker.model.gpu.gpu_memory import CopyStream, GpuMemory, runs
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.tiers.host import Copier, HostTier
from tests.support.devices import DEVICES
from tests.support.late_stream import LateStream

BLOCKS, SLOTS, LIMIT_S = 40, 50, 30
SHAPES = {
    "large": (KvShape(2, 2, 128, torch.float32), 16),  # 64 KiB: as they lie
    "small": (KvShape(2, 1, 8, torch.bfloat16), 4),  # 256 bytes: staged
    "odd": (KvShape(1, 1, 1, torch.float16), 3),  # 12 bytes: no whole words
    "int8": (KvShape(2, 1, 8, torch.float32, quantized=True), 4),
}


class Rig:
    def __init__(self, device: str, shape: str, *, pinned: bool = True) -> None:
        self.stream: Any = LateStream() if device == "cpu" else CopyStream(torch.device(device))
        self.pool = KvPool(SHAPES[shape][0], BLOCKS, SHAPES[shape][1], torch.device(device))
        self.memory = GpuMemory(self.pool, self.stream)
        self.size = self.memory.block_bytes
        self.chance = random.Random(f"{shape} {pinned}")
        length = SLOTS * self.size
        self.host = self.memory.host_memory(length) if pinned else memoryview(bytearray(length))
        self.rows = np.frombuffer(self.host, dtype=np.uint8).reshape(SLOTS, self.size)
        self.fill()

    def fill(self) -> None:
        noise = np.frombuffer(self.chance.randbytes((BLOCKS + SLOTS) * self.size), dtype=np.uint8)
        self.rows[:] = noise[: SLOTS * self.size].reshape(SLOTS, self.size)
        self._bytes.copy_(torch.from_numpy(noise[SLOTS * self.size :].reshape(BLOCKS, self.size).copy()))
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def _bytes(self) -> torch.Tensor:
        return self.pool.data.view(BLOCKS, -1).view(torch.uint8)

    def blocks(self) -> Any:
        return self._bytes.cpu().numpy().copy()

    def pairs(self) -> tuple[list[int], list[int]]:
        """Random ones, some of them neighbours, none twice."""
        blocks, slots = list(range(BLOCKS)), list(range(SLOTS))
        start, count = self.chance.randrange(BLOCKS), self.chance.randrange(1, BLOCKS)
        for numbers in blocks, slots:
            for _ in range(self.chance.choice((0, 3, 60))):
                one, other = (self.chance.randrange(len(numbers)) for _ in range(2))
                numbers[one], numbers[other] = numbers[other], numbers[one]
        return blocks[start : start + count], slots[start : start + count][: BLOCKS - start]


@pytest.fixture(autouse=True)
def many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 3 * 2**16)  # three large blocks
    monkeypatch.setattr(module, "PIECE_BYTES", 1500)  # of large blocks one, of small ones five, of odd ones all


pinned_or_not = pytest.mark.parametrize("pinned", [True, False])
of_all_shapes = pytest.mark.parametrize("shape", SHAPES)
on_all_devices = pytest.mark.parametrize("device", DEVICES)


@on_all_devices
@of_all_shapes
@pinned_or_not
def test_every_byte_lands_where_it_should(device: str, shape: str, pinned: bool) -> None:
    rig = Rig(device, shape, pinned=pinned)
    for _ in range(12):
        rig.fill()
        blocks, slots = rig.pairs()
        expected, before = rig.rows.copy(), rig.blocks()
        expected[slots] = before[blocks]
        assert sum(rig.memory.read_blocks(blocks, rig.host, slots)) == len(blocks)
        assert (rig.rows == expected).all()
        assert (rig.blocks() == before).all()
        rig.fill()
        expected, before = rig.blocks(), rig.rows.copy()
        expected[blocks] = before[slots]
        assert sum(rig.memory.write_blocks(blocks, rig.host, slots)) == len(blocks)
        assert (rig.blocks() == expected).all()
        assert (rig.rows == before).all()


@on_all_devices
@of_all_shapes
@pinned_or_not
def test_a_source_may_come_twice_and_a_target_may_not(device: str, shape: str, pinned: bool) -> None:
    rig = Rig(device, shape, pinned=pinned)
    assert sum(rig.memory.read_blocks([4, 4, 5], rig.host, [9, 8, 7])) == 3
    assert (rig.rows[[9, 8, 7]] == rig.blocks()[[4, 4, 5]]).all()
    assert sum(rig.memory.write_blocks([0, 1, 2], rig.host, [20, 20, 20])) == 3
    assert (rig.blocks()[:3] == rig.rows[20]).all()
    blocks, rows = rig.blocks(), rig.rows.copy()
    for copy, first, second in (
        (rig.memory.read_blocks, [1, 2], [3, 3]),
        (rig.memory.write_blocks, [3, 3], [1, 2]),
        (rig.memory.read_blocks, [1, 2], [3]),
    ):
        with pytest.raises(ValueError, match="twice"):
            list(copy(first, rig.host, second))
    for first, second in (([BLOCKS], [0]), ([-1], [0]), ([0], [SLOTS]), ([0], [-1])):
        for copy in rig.memory.read_blocks, rig.memory.write_blocks:
            with pytest.raises(IndexError):
                list(copy(first, rig.host, second))
    assert (rig.blocks() == blocks).all()
    assert (rig.rows == rows).all()
    assert list(rig.memory.read_blocks([], rig.host, [])) == []


@on_all_devices
@pinned_or_not
def test_one_block_to_memory_of_any_owner(device: str, pinned: bool) -> None:
    rig = Rig(device, "large", pinned=pinned)
    target = bytearray(rig.size)
    rig.memory.read(7, memoryview(target))
    assert bytes(target) == rig.blocks()[7].tobytes()
    rig.memory.write(3, memoryview(bytes(target)))  # which may be read-only
    assert rig.blocks()[3].tobytes() == target
    assert rig.memory.view(3) is None


@pytest.mark.parametrize(
    ("shape", "pinned", "batch"), [("large", True, 3), ("large", False, 1), ("small", True, 5), ("odd", True, 125)]
)
def test_batches_are_bounded_and_the_next_one_is_queued_in_time(shape: str, pinned: bool, batch: int) -> None:
    rig = Rig("cpu", shape, pinned=pinned)
    blocks, slots = list(range(0, BLOCKS, 2)), list(range(BLOCKS, BLOCKS - 20, -1))
    copies = rig.memory.read_blocks(blocks, rig.host, slots)
    assert rig.stream.did == []
    assert next(copies) == 0
    assert rig.stream.did == ["wait"], "earlier steps may write the blocks"
    numbers = []
    for count in copies:
        numbers.append(count)
        assert (rig.rows[slots[: sum(numbers)]] == rig.blocks()[blocks[: sum(numbers)]]).all()
        assert (rig.stream.under_way > 0) == (sum(numbers) < len(blocks)), "the link has no rest"
    assert numbers == [min(batch, len(blocks) - at) for at in range(0, len(blocks), batch)]
    assert rig.stream.did.count("wait") == 1


@on_all_devices
@of_all_shapes
@pinned_or_not
def test_what_is_closed_early_has_nothing_under_way(device: str, shape: str, pinned: bool) -> None:
    rig = Rig(device, shape, pinned=pinned)
    for made in range(4):
        copies = rig.memory.write_blocks(range(20), rig.host, range(20, 40))
        done = sum(next(copies, 0) for _ in range(made))
        other = threading.Thread(target=copies.close)
        other.start()
        other.join(LIMIT_S)
        rows = rig.rows.copy()
        assert (rig.blocks()[:done] == rows[20 : 20 + done]).all()
        assert device != "cpu" or rig.stream.under_way == 0
        assert rig.memory._ring.qsize() == module.PIECES


@on_all_devices
@pytest.mark.parametrize(("shape", "pinned"), [("large", True), ("large", False), ("small", True)])
def test_callers_share_the_ring(device: str, shape: str, pinned: bool) -> None:
    """More of them than pieces, while one that holds two of them rests."""
    rig = Rig(device, shape, pinned=pinned)
    resting = rig.memory.read_blocks(range(30), rig.host, range(30))
    next(resting), next(resting)
    targets = [bytearray(rig.size * 20) for _ in range(6)]
    blocks = [[(17 * at + number) % BLOCKS for at in range(20)] for number in range(6)]

    def copy(number: int) -> None:
        for _ in range(5):
            sum(rig.memory.read_blocks(blocks[number], memoryview(targets[number]), range(20)))

    threads = [threading.Thread(target=copy, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    sum(resting)
    assert not any(thread.is_alive() for thread in threads)
    assert (rig.rows[:30] == rig.blocks()[:30]).all()
    for number, target in enumerate(targets):
        assert bytes(target) == rig.blocks()[blocks[number]].tobytes()


@pytest.mark.parametrize(("shape", "pinned"), [("large", True), ("large", False), ("small", True)])
def test_a_failing_copy_fails_its_job_alone(shape: str, pinned: bool) -> None:
    rig = Rig("cpu", shape, pinned=pinned)
    host, copier = HostTier(rig.host, rig.size, rig.pool.block_size), Copier()
    blocks, slots = list(range(0, BLOCKS, 2)), list(range(0, 40, 2))
    left: list[int] = []
    rig.stream.fails_at = 4
    bad = host.copy_job(rig.memory.write_blocks, blocks, slots, lambda: left.append(rig.stream.under_way))
    copier.bring(bad)
    ended = threading.Event()
    good = host.copy_job(rig.memory.read_blocks, blocks, slots, ended.set)
    copier.offload(good)
    assert ended.wait(LIMIT_S)
    copier.close()
    assert bad.ended
    assert bad.done < len(blocks)
    assert left == [0], "its blocks are given back"
    assert good.done == len(blocks)
    assert (rig.rows[slots] == rig.blocks()[blocks]).all()
    assert rig.memory._ring.qsize() == module.PIECES
    assert copier.speed_out.bytes_total == good.done * rig.size


def test_memory_is_pinned_exactly_and_for_as_long_as_its_owner_lives() -> None:
    rig = Rig("cpu", "large")
    address, stream, memory = rig.rows.ctypes.data, rig.stream, rig.host
    assert stream.pinned[address] == SLOTS * rig.size
    assert sorted(stream.pinned.values()) == [module.PIECES * rig.size, SLOTS * rig.size]
    del rig
    gc.collect()
    assert stream.pinned == {}
    memory[:3] = b"abc"


def test_a_driver_that_refuses_to_pin_makes_copies_slower_only(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("cpu", "large")
    rig.stream.refuses = True
    host = rig.memory.host_memory(5 * rig.size)
    assert "cannot be pinned (CUDA error 2)" in caplog.text
    assert sum(rig.memory.read_blocks([9, 3, 4], host, [0, 1, 2])) == 3
    assert bytes(host[: 3 * rig.size]) == rig.blocks()[[9, 3, 4]].tobytes()


@pytest.mark.parametrize(
    ("blocks", "slots", "found"),
    [
        ([], [], []),
        ([5], [2], [(5, 2, 1)]),
        ([5, 6, 7], [0, 1, 2], [(5, 0, 3)]),
        ([5, 6, 7], [0, 1, 9], [(5, 0, 2), (7, 9, 1)]),
        ([5, 4, 5, 6], [3, 4, 5, 6], [(5, 3, 1), (4, 4, 3)]),
        ([1, 2, 4], [2, 1, 0], [(1, 2, 1), (2, 1, 1), (4, 0, 1)]),
    ],
)
def test_neighbours_on_both_sides_are_one_run(
    blocks: Sequence[int], slots: Sequence[int], found: list[tuple[int, int, int]]
) -> None:
    assert list(runs(blocks, slots)) == found
