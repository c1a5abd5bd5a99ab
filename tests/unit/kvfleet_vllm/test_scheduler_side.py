"""vLLM's scheduler and the worker beside it over a real socket, with stand-ins for vLLM's objects."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvfleet_vllm import sidecar_link
from kvfleet_vllm.block_moves import BlockMoves, LoadBlocks, SaveBlocks, SaveState, SharedStore
from kvfleet_vllm.cache_groups import CacheGroups
from kvfleet_vllm.scheduler_side import SchedulerSide, erase
from kvfleet_vllm.wire import (
    VERSION,
    BlocksErased,
    BlocksSaving,
    Decoder,
    EngineHello,
    EngineStep,
    EraseBlocks,
    GrantSlots,
    Message,
    Scheduled,
    StateSaving,
    encode,
)

HELLO = EngineHello(VERSION, "i", 1, "0", {})


class Worker:
    """The other side: it listens, and reads what there is."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen(4)
        self.listener.setblocking(False)
        self.link: socket.socket | None = None

    def accept(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link, _ = self.listener.accept()
        self.link.setblocking(False)
        self.decoder = Decoder()

    def heard(self) -> list[Message]:
        assert self.link is not None
        found: list[Message] = []
        try:
            while data := self.link.recv(1 << 16):
                found += self.decoder.feed(data)
        except BlockingIOError:
            pass
        return found

    def order(self, *hashes: int | bytes, number: int = 1) -> None:
        self.say(EraseBlocks(number, hashes))

    def say(self, message: Message) -> None:
        assert self.link is not None
        self.link.sendall(encode([message]))

    def die(self) -> None:
        self.listener.close()
        if self.link is not None:
            self.link.close()
        Path(self.path).unlink(missing_ok=True)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    one = Worker(str(tmp_path / "w"))
    yield one
    one.die()


@pytest.fixture
def side() -> Iterator[SchedulerSide]:
    one = SchedulerSide(lambda: HELLO, clock=lambda: 0.0, groups=CacheGroups(32))
    one.pool = Pool(4)
    yield one
    one.close()


class Pool:
    """Blocks 0, 1, ...; each but the last one has a hash, of which the last 8 bytes are its number."""

    def __init__(self, count: int) -> None:
        self.blocks = [SimpleNamespace(block_id=at, block_hash=key(at)) for at in range(count)]
        self.blocks[-1].block_hash = None
        self.cached_block_hashes_by_block: dict[int, set[bytes]] = {}
        self.evicted: set[int] = set()

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


def key(number: int, group: int = 0) -> bytes:
    return b"\xaa" * 24 + number.to_bytes(8, "big") + group.to_bytes(4, "big")


def request(name: str, path: str | None) -> Any:
    params = None if path is None else {"kvfleet": {"version": VERSION, "socket": path}}
    return SimpleNamespace(request_id=f"generate-tokens-{name}-00000000", num_tokens=5, kv_transfer_params=params)


def first_step(name: str) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=f"generate-tokens-{name}-00000000", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[]),
        num_scheduled_tokens={f"generate-tokens-{name}-00000000": 5},
        total_num_scheduled_tokens=5,
        preempted_req_ids=None,
    )


TOLD = EngineStep(0.0, 1, 5, 5, ())


def test_hello_then_the_news_of_a_step(side: SchedulerSide, worker: Worker) -> None:
    side.request_added(request("nobody", None))
    side.step(first_step("nobody"))
    side.request_added(request("r", worker.path))
    side.request_added(request("r2", worker.path))
    side.step(first_step("r"))
    worker.accept()
    assert worker.heard() == [HELLO, TOLD, Scheduled("r", 0, 0)]
    with pytest.raises(BlockingIOError):
        worker.listener.accept()  # one connection for all


def test_blocks_are_forgotten_before_a_later_request_looks_for_its_own(side: SchedulerSide, worker: Worker) -> None:
    side.request_added(request("r", worker.path))
    worker.accept()
    worker.order(1, key(2)[:-4], 77, number=9)
    side.request_added(request("other", None))
    assert side.pool.evicted == {1, 2}
    assert worker.heard()[1:] == [BlocksErased(9, 2)]


def test_a_step_obeys_too(side: SchedulerSide, worker: Worker) -> None:
    side.request_added(request("r", worker.path))
    worker.accept()
    worker.order(0)
    side.step(first_step("r"))
    assert side.pool.evicted == {0}
    assert worker.heard() == [HELLO, BlocksErased(1, 1), TOLD, Scheduled("r", 0, 0)]


def test_erasing_meets_copies_other_groups_and_names_of_unfinished_blocks() -> None:
    pool = Pool(6)
    pool.blocks[3].block_hash = key(1)
    pool.blocks[4].block_hash = key(1, group=2)
    pool.cached_block_hashes_by_block = {2: {key(8), key(9)}, 5: {key(7)}}
    assert erase(pool, [1, 9]) == 4
    assert pool.evicted == {1, 2, 3, 4}
    assert erase(pool, []) == 0


def test_a_worker_that_restarts_is_met_again(side: SchedulerSide, worker: Worker) -> None:
    side.request_added(request("r", worker.path))
    worker.accept()
    worker.die()
    side.step(first_step("r"))
    side.request_added(request("r2", worker.path))  # nobody listens
    side.step(first_step("r2"))
    again = Worker(worker.path)
    side.step(first_step("r2"))
    with pytest.raises(BlockingIOError):
        again.accept()  # it waits for a request
    side.request_added(request("r3", again.path))
    side.step(first_step("r3"))
    again.accept()
    assert again.heard() == [HELLO, TOLD, Scheduled("r3", 0, 0)]
    again.die()


def test_another_path_takes_over_once_it_is_reached(side: SchedulerSide, worker: Worker, tmp_path: Path) -> None:
    side.request_added(request("r", worker.path))
    worker.accept()
    side.request_added(request("r2", str(tmp_path / "none")))
    side.step(first_step("r"))
    assert worker.heard() == [HELLO, TOLD, Scheduled("r", 0, 0)]
    other = Worker(str(tmp_path / "other"))
    side.request_added(request("r3", other.path))
    other.accept()
    assert other.heard() == [HELLO]
    assert worker.link is not None
    assert worker.link.recv(1) == b""
    other.die()


def test_a_worker_that_does_not_read_is_left(
    side: SchedulerSide, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_link, "BUFFER", 1 << 12)
    side.request_added(request("r", worker.path))
    worker.accept()
    for _ in range(2000):
        side.step(first_step("r"))  # would hang if it waited
    heard = worker.heard()
    assert 3 <= len(heard) < 4001
    assert worker.link is not None
    assert worker.link.recv(1) == b""
    side.request_added(request("r2", worker.path))
    worker.accept()
    assert worker.heard() == [HELLO]


def test_what_cannot_be_read_closes_the_connection(side: SchedulerSide, worker: Worker) -> None:
    side.request_added(request("r", worker.path))
    worker.accept()
    assert worker.link is not None
    worker.link.sendall(b"\xff" * 8)
    side.step(first_step("r"))
    assert worker.heard() == [HELLO]
    assert worker.link.recv(1) == b""


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 300, "/none"])
def test_a_path_that_cannot_be_reached_costs_nothing(side: SchedulerSide, path: str) -> None:
    side.request_added(request("r", path))
    side.step(first_step("r"))


STORE = SharedStore("/dev/shm/x", 64)
BLOCKS = list(range(100, 140))


def moving(path: str, name: str = "r", tokens: int = 100, **more: Any) -> Any:
    asked = {"version": VERSION, "socket": path, "store": {"path": STORE.path, "slots": 64, "block_tokens": 32}, **more}
    return SimpleNamespace(
        request_id=f"generate-tokens-{name}-00000000", num_tokens=tokens, kv_transfer_params={"kvfleet": asked}
    )


def scheduled(request: Any, computed: int, count: int) -> Any:
    one = first_step("")
    one.scheduled_new_reqs = [SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed)]
    one.num_scheduled_tokens = {request.request_id: count}
    one.total_num_scheduled_tokens = count
    one.kv_connector_block_state = SimpleNamespace(get_block_ids=lambda _: (BLOCKS,))
    return one


def test_a_restored_request_is_told_and_its_next_blocks_are_saved(side: SchedulerSide, worker: Worker) -> None:
    one = moving(worker.path, restore={"at": 0, "slots": [4, 5]}, save_from=2)
    side.request_added(one)
    worker.accept()
    worker.say(GrantSlots((20, 21, 22)))
    assert side.restorable(one, 0) == 64
    side.allocated(one, (BLOCKS,), 64)
    empty = scheduled(one, 0, 0)
    empty.scheduled_new_reqs, empty.num_scheduled_tokens = [], {}
    load = LoadBlocks(one.request_id, "r", (100, 101), (4, 5))
    assert side.step(empty) == BlockMoves(1, worker.path, STORE, (), (load,), (), True)
    side.loaded([one.request_id], ())
    side.allocated(one, (BLOCKS,), 0)
    save = SaveBlocks("r", 2, (102,), (20,))
    assert side.step(scheduled(one, 64, 36)) == BlockMoves(1, worker.path, STORE, (save,), (), (), False)
    assert worker.heard() == [
        HELLO, EngineStep(0.0, 1, 36, 36, ()), Scheduled("r", 0, 64), BlocksSaving("r", 2, (20,)),
    ]  # fmt: skip


def test_nothing_is_saved_of_a_request_whose_load_failed(side: SchedulerSide, worker: Worker) -> None:
    one = moving(worker.path, restore={"at": 0, "slots": [4, 5]}, save_from=0)
    side.request_added(one)
    worker.accept()
    worker.say(GrantSlots(tuple(range(20, 40))))
    assert side.restorable(one, 0) == 64
    side.allocated(one, (BLOCKS,), 64)
    side.loaded([one.request_id], {101})
    assert side.step(scheduled(one, 32, 68)).saves == ()
    assert worker.heard()[2:] == [Scheduled("r", 0, 32)]


def test_a_worker_that_restarts_is_neither_restored_from_nor_saved_to(side: SchedulerSide, worker: Worker) -> None:
    one = moving(worker.path, restore={"at": 0, "slots": [4, 5]}, save_from=0)
    side.request_added(one)
    worker.accept()
    worker.say(GrantSlots((20, 21, 22, 23)))
    worker.die()
    again = Worker(worker.path)
    side.request_added(request("new", again.path))
    again.accept()
    assert side.restorable(one, 0) == 0
    side.allocated(one, (BLOCKS,), 0)
    moves = side.step(scheduled(one, 0, 100))
    assert moves == BlockMoves(2, again.path, None, (), (), (), False)
    assert [kind for kind in map(type, again.heard()) if kind is BlocksSaving] == []
    again.die()


def test_a_request_of_a_worker_that_is_gone_moves_nothing(side: SchedulerSide, worker: Worker, tmp_path: Path) -> None:
    """Its slots are not those of the worker that is connected."""
    side.request_added(request("r", worker.path))
    worker.accept()
    worker.say(GrantSlots((20, 21, 22, 23)))
    late = moving(str(tmp_path / "gone"), "late", restore={"at": 0, "slots": [4, 5]}, save_from=0)
    side.request_added(late)
    assert side.restorable(late, 0) == 0
    moves = side.step(scheduled(late, 0, 100))
    assert (moves.connection, moves.store, moves.saves) == (1, None, ())


def test_a_worker_that_goes_between_planning_and_telling(side: SchedulerSide, worker: Worker) -> None:
    one, two = moving(worker.path, restore={"at": 0, "slots": [4, 5]}, save_from=0), moving(worker.path, "r2")
    side.request_added(one)
    side.request_added(two)
    worker.accept()
    worker.say(GrantSlots((20, 21, 22, 23)))
    assert side.restorable(one, 0) == 64
    side.allocated(one, (BLOCKS,), 64)
    worker.die()
    moves = side.step(scheduled(two, 0, 100))
    assert (moves.connection, moves.saves, len(moves.loads)) == (0, (), 1)  # the load has to end


def test_where_vllm_would_fail_what_cannot_be_loaded_nothing_is_restored(worker: Worker) -> None:
    side = SchedulerSide(lambda: HELLO, groups=CacheGroups(32), recomputes=False)
    one = moving(worker.path, restore={"at": 0, "slots": [4, 5]})
    side.request_added(one)
    assert side.restorable(one, 0) == 0
    side.close()


def test_an_adapters_blocks_move_as_their_chain_begins_with_a_root_of_its_own(
    side: SchedulerSide, worker: Worker
) -> None:
    one = moving(worker.path, restore={"at": 0, "slots": [4, 5]}, save_from=0)
    one.lora_request = object()
    side.request_added(one)
    assert side.restorable(one, 0) == 64


@pytest.mark.parametrize("special", [{"mm_features": [1]}, {"prompt_embeds": 1}, {"request_id": "0_generate-x"}])
def test_blocks_that_tokens_alone_do_not_name_stay(side: SchedulerSide, worker: Worker, special: Any) -> None:
    one = moving(worker.path, restore={"at": 0, "slots": [4, 5]}, save_from=0)
    vars(one).update(special)
    side.request_added(one)
    worker.accept()
    worker.say(GrantSlots((20, 21, 22, 23)))
    assert side.restorable(one, 0) == 0
    assert side.step(scheduled(one, 0, 100)).saves == ()


def test_where_blocks_cannot_be_moved_none_is(worker: Worker) -> None:
    side = SchedulerSide(lambda: HELLO)
    one = moving(worker.path, restore={"at": 0, "slots": [4, 5]}, save_from=0)
    side.request_added(one)
    assert side.restorable(one, 0) == 0
    side.allocated(one, (BLOCKS,), 0)
    assert side.step(first_step("r")).saves == ()
    side.close()


def test_a_hybrid_models_state_is_restored_and_saved(worker: Worker) -> None:
    side = SchedulerSide(lambda: HELLO, lambda: 0.0, CacheGroups(32, (1,), (0,)))
    one = moving(worker.path, restore={"at": 0, "slots": [4, 5], "state": [9]}, save_from=2)
    side.request_added(one)
    worker.accept()
    worker.say(GrantSlots((20, 21, 22)))
    assert side.restorable(one, 0) == 64
    side.allocated(one, ([0, 7], [1, 2]), 64)
    side.loaded([one.request_id], ())
    step = scheduled(one, 64, 32)
    step.kv_connector_block_state = SimpleNamespace(get_block_ids=lambda _: ([0, 0, 8], [1, 2, 3]))
    moves = side.step(step)
    assert moves.loads == (LoadBlocks(one.request_id, "r", (1, 2, 7), (4, 5, 9)),)
    assert moves.saves == (SaveBlocks("r", 2, (3,), (20,)), SaveState("r", 3, (8,), (21,)))
    assert worker.heard()[-2:] == [BlocksSaving("r", 2, (20,)), StateSaving("r", 3, (21,))]
    side.close()


def test_nothing_is_saved_of_a_request_whose_load_vllm_gave_up(worker: Worker) -> None:
    side = SchedulerSide(lambda: HELLO, lambda: 0.0, CacheGroups(32, (1,), (0,)))
    one = moving(worker.path, restore={"at": 0, "slots": [4, 5], "state": [9]}, save_from=0)
    side.request_added(one)
    worker.accept()
    worker.say(GrantSlots((20, 21, 22)))
    assert side.restorable(one, 0) == 64
    side.allocated(one, ([0, 7], [1, 2]), 64)
    side.loaded([one.request_id], (), {one.request_id})
    assert side.step(scheduled(one, 0, 64)).saves == ()
    side.close()
