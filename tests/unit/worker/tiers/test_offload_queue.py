"""A bounded queue in which parents stay before their children."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfleet.worker.blocks.chain_location import BlockName
from kvfleet.worker.tiers.write_behind import BATCH_BLOCKS, BATCH_BYTES, Offload, OffloadQueue

ROOT, OTHER = b"r" * 16, b"o" * 16


def offload(at: int, size: int = 100, *, root: bytes = ROOT, lossy: bool = False, expires: float = 1e9) -> Offload:
    name = BlockName(root, at.to_bytes(16, "big"), b"p" * 16, b"\0" * 4)
    return Offload(name, memoryview(bytes(size)), lossy, lambda: None, expires)


def numbers(offloads: list[Offload]) -> list[int]:
    return [int.from_bytes(one.name.hash, "big") for one in offloads]


def filled(*offloads: Offload, max_bytes: int = 10**9) -> OffloadQueue:
    queue = OffloadQueue(max_bytes)
    for one in offloads:
        assert queue.add(one)
    return queue


def test_it_is_bounded_and_what_is_under_way_counts() -> None:
    queue = filled(*(offload(at) for at in range(10)), max_bytes=1000)
    assert not queue.add(offload(10))
    batch = queue.take()
    assert numbers(batch) == list(range(10))
    assert not queue.add(offload(10)), "its memory is in use still"
    queue.done()
    assert queue.nbytes == 0
    assert queue.add(offload(10))


def test_a_block_larger_than_all_of_it_may_wait_alone() -> None:
    queue = filled(offload(0, 5000), max_bytes=1000)
    assert not queue.add(offload(1, 1))


def test_a_batch_is_of_one_root_equally_lossy_and_not_too_large() -> None:
    queue = filled(offload(0), offload(1), offload(2, root=OTHER), offload(3, root=OTHER, lossy=True), offload(4))
    taken = []
    for _ in range(4):
        taken.append(numbers(queue.take()))
        queue.done()
    assert taken == [[0, 1], [2], [3], [4]]
    queue = filled(*(offload(at) for at in range(BATCH_BLOCKS + 5)))
    assert len(queue.take()) == BATCH_BLOCKS
    queue = filled(*(offload(at, BATCH_BYTES // 2 + 1) for at in range(3)))
    assert numbers(queue.take()) == [0]
    queue = filled(offload(0, 2 * BATCH_BYTES), offload(1))
    assert numbers(queue.take()) == [0], "one block goes in any case"


def test_what_did_not_get_through_is_first_again() -> None:
    queue = filled(offload(0, expires=5.0), offload(1, expires=5.0), offload(2, root=OTHER))
    queue.take()
    assert queue.put_back(1.0) == []
    assert numbers(queue.take()) == [0, 1]
    assert numbers(queue.put_back(6.0)) == [0, 1]
    assert numbers(queue.take()) == [2]


def test_what_is_erased_while_under_way_is_not_tried_again() -> None:
    queue = filled(*(offload(at) for at in range(4)))
    queue.take()
    queue.add(offload(4))
    assert queue.drop({(1).to_bytes(16, "big")}) == []
    assert numbers(queue.put_back(0.0)) == [1]
    assert numbers(queue.take()) == [0, 2, 3, 4]
    queue.done()
    queue.add(offload(1))
    queue.take()
    assert queue.put_back(0.0) == [], "offered again after the erase, it is wanted"


class Queue(RuleBasedStateMachine):
    """Nothing is lost, nothing comes twice, order stays, bytes are right."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = OffloadQueue(2000)
        self.next = 0
        self.now = 0.0
        self.waiting: list[int] = []
        self.batch: list[int] = []
        self.unwanted: set[int] = set()

    @rule(size=st.integers(1, 900), lossy=st.booleans(), root=st.sampled_from([ROOT, OTHER]))
    def add(self, size: int, lossy: bool, root: bytes) -> None:
        if self.queue.add(offload(self.next, size, root=root, lossy=lossy, expires=self.now + 10)):
            self.waiting.append(self.next)
        self.next += 1

    @precondition(lambda self: not self.batch)
    @rule()
    def take(self) -> None:
        self.batch = numbers(self.queue.take())
        assert self.batch == self.waiting[: len(self.batch)]
        assert bool(self.batch) == bool(self.waiting)
        self.waiting = self.waiting[len(self.batch) :]
        self.unwanted = set()

    @precondition(lambda self: self.batch)
    @rule()
    def done(self) -> None:
        self.queue.done()
        self.batch = []

    @precondition(lambda self: self.batch)
    @rule()
    def put_back(self) -> None:
        ended = numbers(self.queue.put_back(self.now))
        assert self.unwanted <= set(ended)
        self.waiting = [one for one in self.batch if one not in ended] + self.waiting
        self.batch = []

    @rule(which=st.sets(st.integers(0, 40)))
    def drop(self, which: set[int]) -> None:
        dropped = numbers(self.queue.drop({one.to_bytes(16, "big") for one in which}))
        assert dropped == [one for one in self.waiting if one in which]
        self.waiting = [one for one in self.waiting if one not in which]
        self.unwanted |= which & set(self.batch)

    @rule(seconds=st.floats(0, 8))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        expired = numbers(self.queue.expired(self.now))
        assert expired == self.waiting[: len(expired)]
        self.waiting = self.waiting[len(expired) :]

    @invariant()
    def holds(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.waiting)
        if not self.waiting and not self.batch:
            assert self.queue.nbytes == 0

    def teardown(self) -> None:
        assert numbers(self.queue.expired(float("inf"))) == self.waiting
        assert not self.queue


Queue.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueue = pytest.mark.filterwarnings("error")(Queue.TestCase)
