"""Anything in any order, and from many threads at once: the books balance, and nobody sees bytes that were not put."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfleet.vault.store.block_table import StoredChange, bytes_for, net, tier_events
from kvfleet.vault.store.store import VaultStore
from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.serving import ServedBlocks
from tests.support.kv_blocks import OTHER_ROOT, ROOT, Block, block, chain, hashes

ONE = bytes_for(chain(1)[0].header)


def a_forest() -> list[Block]:
    """Chains that part ways, of two roots; of some blocks a lossy version and a second exact one with other bytes."""
    trunk = chain(4)
    blocks = [*trunk, *chain(3, root=OTHER_ROOT)]
    for at, first in ((1, 100), (1, 200), (3, 300)):
        parent = trunk[at].hash
        for step in range(3):
            blocks.append(block(parent, first + 4 * step))
            parent = blocks[-1].hash
    twins = [block(one.header.parent, _first_id(one), root=one.header.root, salt=1) for one in blocks[::2]]
    lossy = [block(one.header.parent, _first_id(one), root=one.header.root, size=300, lossy=True) for one in blocks]
    return [*blocks, *twins, *lossy]


def _first_id(one: Block) -> int:
    return int.from_bytes(one.header.ids[:4], "little")


FOREST = a_forest()
BY_HEADER = {one.header: one for one in FOREST}
CHOICES = st.integers(0, len(FOREST) - 1)
SEVERAL = st.lists(CHOICES, min_size=1, max_size=6)
ROOTS = st.sampled_from([ROOT, OTHER_ROOT])


def replay(held: set[bytes], changes: Iterable[StoredChange]) -> None:
    """As a listener does: what is stored was not held, what is removed was."""
    for change in changes:
        assert (change.hash in held) == change.removed
        (held.discard if change.removed else held.add)(change.hash)


class StoreMachine(RuleBasedStateMachine):
    """Against a plain model: which version of each block was committed last, by what the events say is held."""

    def __init__(self) -> None:
        super().__init__()
        self.store = VaultStore(8 * ONE)
        self.version: dict[bytes, Block] = {}
        self.held: set[bytes] = set()
        self.arriving: list[tuple[Block, memoryview]] = []
        self.sending: list[tuple[ServedBlocks, list[bytes]]] = []

    def follow(self) -> None:
        replay(self.held, self.store.take_changes())
        self.version = {one: version for one, version in self.version.items() if one in self.held}

    @rule(choice=CHOICES)
    def reserve(self, choice: int) -> None:
        one = FOREST[choice]
        held = self.version.get(one.hash)
        buffer = self.store.reserve(one.header)
        self.follow()
        if held is not None and (one.header.lossy or not held.header.lossy):
            assert buffer is None
        if buffer is not None:
            buffer[:] = one.payload
            self.arriving.append((one, buffer))

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.arriving:
            one, buffer = self.arriving.pop(data.draw(st.integers(0, len(self.arriving) - 1)))
            held = self.version.get(one.hash)
            as_good = held is not None and (one.header.lossy or not held.header.lossy)
            if self.store.commit(one.header, buffer):
                assert not as_good
                self.version[one.hash] = one
            self.follow()

    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        if self.arriving:
            one, buffer = self.arriving.pop(data.draw(st.integers(0, len(self.arriving) - 1)))
            self.store.abandon(one.header, buffer)

    @rule(several=SEVERAL, root=ROOTS, exact=st.booleans())
    def get(self, several: list[int], root: bytes, exact: bool) -> None:
        asked = [FOREST[one] for one in several]
        served = self.store.get(root, hashes(asked), exact)
        assert [one is not None for one in served.blocks] == self.store.has(root, hashes(asked), exact)
        expected = []
        for one, found in zip(asked, served.blocks, strict=True):
            version = self.version.get(one.hash)
            shown = version is not None and version.header.root == root and not (exact and version.header.lossy)
            assert (found is not None) == shown
            if found is not None and version is not None:
                assert found[0] == version.header
                expected.append(version.payload)
        self.sending.append((served, expected))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.sending:
            served, expected = self.sending.pop(data.draw(st.integers(0, len(self.sending) - 1)))
            assert [bytes(one[1]) for one in served.blocks if one is not None] == expected
            served.release()

    @rule(several=SEVERAL, root=ROOTS)
    def erase(self, several: list[int], root: bytes) -> None:
        asked = [FOREST[one] for one in several]
        wanted = {one.hash for one in asked if one.hash in self.held and one.header.root == root}
        parents = {one: self.version[one].header.parent for one in self.held}
        gone: set[bytes] = set()
        while ends := {one for one in wanted - gone if one not in {parents[left] for left in self.held - gone}}:
            gone |= ends
        before = set(self.held)
        assert self.store.erase(root, hashes(asked)) == len(gone)
        self.follow()
        assert before - self.held == gone

    @invariant()
    def balanced(self) -> None:
        self.store.check_integrity()
        assert self.store.table.memory.used_bytes <= self.store.table.memory.max_bytes
        assert self.store.holdings() == ([], list(self.store.table.held()))
        assert {one.hash for one in self.store.table.held()} == self.held == set(self.version)

    def teardown(self) -> None:
        for one, buffer in self.arriving:
            self.store.abandon(one.header, buffer)
        for served, _ in self.sending:
            served.release()
        self.store.check_integrity()
        assert self.store.table.locked_bytes == 0


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase


def test_many_threads_at_once() -> None:
    """Puts, gets, erasures and evictions beside one another; what is got is always what was put, under a bound."""
    store = VaultStore(10 * ONE, check_after_s=0.0)
    failures: list[BaseException] = []
    stop = threading.Event()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(800):
                asked = chance.sample(FOREST, 4)
                root = chance.choice([ROOT, OTHER_ROOT])
                match chance.randrange(6):
                    case 0:
                        store.erase(root, hashes(asked))
                    case 1 | 2:
                        served = store.get(root, hashes(asked), chance.random() < 0.5)
                        for one in served.blocks:
                            if one is not None:
                                check(one[0], one[1], root)
                        served.release()
                    case _:
                        put(store, asked[0], abandon=chance.random() < 0.1)
                assert store.table.memory.used_bytes <= store.table.memory.max_bytes
        except BaseException as error:  # noqa: BLE001 - a thread's: the test raises it
            failures.append(error)

    def check(header: BlockHeader, view: memoryview, root: bytes) -> None:
        assert header.root == root
        assert bytes(view) == BY_HEADER[header].payload

    def follow() -> None:
        """What the loop does: changes and snapshots, taken beside everything else, tell the same."""
        held: set[bytes] = set()
        try:
            while not stop.is_set():
                replay(held, store.take_changes())
                changes, now = store.holdings()
                replay(held, changes)
                assert {one.hash for one in now} == held
            replay(held, store.take_changes())
            assert {one.hash for one in store.holdings()[1]} == held
        except BaseException as error:  # noqa: BLE001 - as above
            failures.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    follower = threading.Thread(target=follow)
    for thread in (follower, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    follower.join()
    assert failures == []
    store.check_integrity()
    counters = store.counters
    assert store.table.locked_bytes == 0
    assert min(counters.hits_total, counters.evictions_total, counters.erased_total, counters.replaced_total) > 0
    assert counters.damaged_total == 0


def put(store: VaultStore, one: Block, *, abandon: bool) -> None:
    buffer = store.reserve(one.header)
    if buffer is not None:
        buffer[:] = one.payload
        if abandon:
            store.abandon(one.header, buffer)
        else:
            store.commit(one.header, buffer)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_what_is_told_is_the_net_of_what_happened(steps: list[tuple[int, bool]]) -> None:
    names = [bytes([number]) * 16 for number in range(6)]
    before = {name for number, name in enumerate(names) if number % 2}
    held, changes = set(before), []
    for number, removed in steps:
        if (names[number] in held) == removed:
            changes.append(StoredChange(removed, names[number - 1], names[number]))
            (held.discard if removed else held.add)(names[number])
    told = set(before)
    events = tier_events(net(changes))
    for event in events:
        for run in event.runs:
            for name in run.hashes:
                assert (name in told) == event.removed
                (told.discard if event.removed else told.add)(name)
    assert told == held
    assert [event.removed for event in events] in ([], [True], [False], [True, False])
