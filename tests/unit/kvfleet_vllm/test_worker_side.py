"""One of vLLM's workers, its blocks and its load thread, with the worker beside vLLM over a real socket and file."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from kvfleet_vllm import worker_side
from kvfleet_vllm.block_copies import LayerBlocks
from kvfleet_vllm.block_moves import BlockMoves, LoadBlocks, SaveBlocks, SharedStore
from kvfleet_vllm.wire import VERSION, BlocksRead, BlocksSaved, Decoder, Message, WorkerHello
from kvfleet_vllm.worker_side import WorkerSide
from tests.support.devices import DEVICES

BLOCKS, SLOTS = 8, 12
HELLO = WorkerHello(VERSION, 0, 1, b"f" * 16, 2 * 64)


class Sidecar:
    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "w")
        self.store = SharedStore(str(folder / "s"), SLOTS)
        Path(self.store.path).write_bytes(os.urandom(SLOTS * HELLO.block_bytes))
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen(4)
        self.listener.setblocking(False)
        self.link: socket.socket | None = None

    def heard(self) -> list[Message]:
        """All since the last time; of a new connection if there is one. Loads take no time."""
        try:
            link, _ = self.listener.accept()
            link.setblocking(False)
            if self.link is not None:
                self.link.close()
            self.link, self.decoder = link, Decoder()
        except BlockingIOError:
            pass
        found: list[Message] = []
        try:
            while self.link is not None and (data := self.link.recv(1 << 16)):
                found += self.decoder.feed(data)
        except BlockingIOError:
            pass
        return [replace(one, seconds=0.0) if isinstance(one, BlocksRead) else one for one in found]

    def hang_up(self) -> None:
        assert self.link is not None
        self.link.close()
        self.link = None

    def moves(
        self,
        *loads: LoadBlocks,
        saves: tuple[SaveBlocks, ...] = (),
        given_up: tuple[str, ...] = (),
        connection: int = 1,
    ) -> BlockMoves:
        path, store = (self.path, self.store) if connection else ("", None)
        return BlockMoves(connection, path, store, saves, loads, given_up, True)

    def slot(self, slot: int) -> bytes:
        return Path(self.store.path).read_bytes()[slot * HELLO.block_bytes :][: HELLO.block_bytes]


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    with TemporaryDirectory(dir="/dev/shm") as folder:  # in memory, which a GPU can pin
        one = Sidecar(Path(folder))
        yield one
    one.listener.close()
    if one.link is not None:
        one.link.close()


def layers(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """A block has 64 bytes in each of two layers."""
    made = torch.randint(0, 1 << 30, (2, BLOCKS, 16), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    return dict(zip("ab", made.to(device).unbind(), strict=True))


def side_of(cache: dict[str, torch.Tensor]) -> WorkerSide:
    return WorkerSide(lambda: HELLO, LayerBlocks(cache, BLOCKS))


@pytest.fixture
def side() -> Iterator[WorkerSide]:
    one = side_of(layers(0))
    yield one
    one.close()


def ends(side: WorkerSide, within: float = 10.0) -> set[str]:
    until = time.monotonic() + within
    while not (found := side.finished(idle=True)):
        assert time.monotonic() < until
    return found


SAVE = SaveBlocks("r", 0, (3, 5), (7, 1))
LOAD = LoadBlocks("generate-tokens-r-0", "r", (4, 6), (7, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_saved_in_one_vllm_and_loaded_in_another(sidecar: Sidecar, device: str) -> None:
    source, other = layers(0, device), layers(1, device)
    side, two = side_of(source), side_of(other)
    moves = sidecar.moves(saves=(SAVE,))
    side.start(moves)
    side.save(moves)
    assert side.finished(idle=True) == set()
    assert sidecar.heard() == [HELLO, BlocksSaved("r", (7, 1))]
    two.start(sidecar.moves(LOAD))
    assert ends(two) == {"generate-tokens-r-0"}
    assert two.take_bad_blocks() == set()
    assert sidecar.heard() == [HELLO, BlocksRead("r", 2, 0.0)]
    for name in "ab":
        assert torch.equal(other[name][[4, 6]], source[name][[3, 5]])
        assert torch.equal(other[name][[0, 1, 2, 3, 5, 7]], layers(1, device)[name][[0, 1, 2, 3, 5, 7]])
    side.close()
    two.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_on_a_gpu_saves_and_loads_wait_for_the_steps_that_are_queued(sidecar: Sidecar) -> None:
    """A step of a second writes the blocks that are saved, another reads those that a load will overwrite."""
    source, other = layers(0, "cuda"), layers(1, "cuda")
    side, two = side_of(source), side_of(other)
    moves = sidecar.moves(saves=(SAVE,))
    torch.zeros(BLOCKS, 16, dtype=torch.int32, device="cuda").add_(1).zero_().clone()
    for one in (side, two):  # the first time loads kernels and allocates, which waits for the device
        one.start(moves)
        one.save(moves)
        one.finished(idle=True)
    torch.cuda._sleep(2_000_000_000)  # cycles
    for name in "ab":
        source[name].add_(1)
    side.save(moves)
    for name in "ab":
        source[name].zero_()  # queued after the save
    assert side.finished(idle=False) == set()
    assert [save.told for save in side._saves] == [BlocksSaved("r", (7, 1))]
    assert side.finished(idle=True) == set()
    assert not side._saves
    torch.cuda._sleep(2_000_000_000)
    before = {name: other[name].clone() for name in "ab"}
    two.start(sidecar.moves(LOAD))
    assert two.finished(idle=False) == set()
    assert ends(two) == {LOAD.request}
    for name in "ab":
        assert torch.equal(before[name], layers(1, "cuda")[name])
        assert torch.equal(other[name][[4, 6]], layers(0, "cuda")[name][[3, 5]] + 1)
    side.close()
    two.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_on_a_gpu_what_fails_ends_when_all_that_it_has_queued_is_done(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are another's after the connection, blocks are computed instead of loaded."""
    side, queued = side_of(layers(0, "cuda")), torch.cuda.Event()

    def fail(*_: object, **__: object) -> None:
        torch.cuda._sleep(1_000_000_000)
        queued.record()
        raise torch.OutOfMemoryError("no room for the second round")

    monkeypatch.setattr(LayerBlocks, "copy", fail)
    moves = sidecar.moves(saves=(SAVE,))
    side.start(moves)
    side.save(moves)
    assert queued.query()
    side.start(sidecar.moves(LOAD, connection=2))
    assert ends(side) == {LOAD.request}
    assert queued.query()
    side.close()


def test_what_was_given_up_is_told(side: WorkerSide, sidecar: Sidecar) -> None:
    side.start(sidecar.moves(given_up=("r", "s")))
    assert sidecar.heard() == [HELLO, BlocksRead("r", 0, 0.0), BlocksRead("s", 0, 0.0)]


def slowly(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None] = lambda: None) -> threading.Event:
    """Loads wait for the event, and do something before they read."""
    go, read = threading.Event(), worker_side._read

    def wait(*arguments: object) -> int:
        assert go.wait(10)
        meanwhile()
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_side, "_read", wait)
    return go


def test_a_slow_load_holds_up_no_step(side: WorkerSide, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    go = slowly(monkeypatch)
    side.start(sidecar.moves(LOAD))
    began = time.monotonic()
    assert all(side.finished(idle=False) == set() for _ in range(100))
    assert time.monotonic() - began < 5
    moves = sidecar.moves(saves=(SaveBlocks("s", 0, (1,), (8,)),))
    side.start(moves)
    side.save(moves)
    assert sidecar.heard() == [HELLO, BlocksSaved("s", (8,))]
    go.set()
    assert ends(side) == {LOAD.request}
    assert sidecar.heard() == [BlocksRead("r", 2, 0.0)]


def test_idle_steps_wait_a_little(side: WorkerSide, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    go = slowly(monkeypatch)
    side.start(sidecar.moves(LOAD))
    began, steps = time.monotonic(), 20
    assert all(side.finished(idle=True) == set() for _ in range(steps))
    assert time.monotonic() - began > 0.9 * steps * worker_side.IDLE_WAIT_S
    go.set()
    assert ends(side) == {LOAD.request}


def test_a_file_that_is_cut_fails_the_load_and_ends_the_connection(side: WorkerSide, sidecar: Sidecar) -> None:
    side.start(sidecar.moves())
    os.truncate(sidecar.store.path, 100)
    side.start(sidecar.moves(LOAD))
    assert ends(side) == {LOAD.request}
    assert (side.take_bad_blocks(), side.take_failed()) == ({4, 6}, {LOAD.request})
    assert (side.take_bad_blocks(), side.take_failed()) == (set(), set())
    assert sidecar.heard() == [HELLO, BlocksRead("r", 0, 0.0)]
    assert sidecar.link is not None
    assert sidecar.link.recv(1) == b""
    moves = sidecar.moves(LOAD, saves=(SAVE,))
    side.start(moves)
    side.save(moves)  # the scheduler does not know yet
    assert ends(side) == {LOAD.request}
    assert side.take_bad_blocks() == {4, 6}


def test_a_file_that_is_cut_is_not_saved_to(side: WorkerSide, sidecar: Sidecar) -> None:
    side.start(sidecar.moves())
    os.truncate(sidecar.store.path, 100)
    side.save(sidecar.moves(saves=(SAVE,)))
    assert sidecar.heard() == [HELLO]
    assert sidecar.link is not None
    assert sidecar.link.recv(1) == b""


def test_a_gpu_without_room_for_a_save_ends_the_connection_and_no_step(
    side: WorkerSide, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(LayerBlocks, "copy", no_room)
    moves = sidecar.moves(saves=(SAVE,))
    side.start(moves)
    side.save(moves)
    assert sidecar.heard() == [HELLO]
    assert sidecar.link is not None
    assert sidecar.link.recv(1) == b""


@pytest.mark.parametrize("slots", [(7, SLOTS), (7, -1)])
def test_slots_that_do_not_exist(side: WorkerSide, sidecar: Sidecar, slots: tuple[int, ...]) -> None:
    before = Path(sidecar.store.path).read_bytes()
    side.start(sidecar.moves(LoadBlocks("v", "r", (4, 6), slots)))
    assert ends(side) == {"v"}
    assert side.take_bad_blocks() == {4, 6}
    moves = sidecar.moves(saves=(SaveBlocks("r", 0, (4, 6), slots),), connection=2)
    side.start(moves)
    side.save(moves)
    assert Path(sidecar.store.path).read_bytes() == before


def test_a_worker_that_hangs_up_during_a_load_may_have_used_the_slots_again(
    side: WorkerSide, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = slowly(monkeypatch, sidecar.hang_up)
    side.start(sidecar.moves(LOAD))
    assert sidecar.heard() == [HELLO]
    go.set()
    assert ends(side) == {LOAD.request}
    assert side.take_bad_blocks() == {4, 6}


def test_a_worker_that_restarts_during_a_load(
    side: WorkerSide, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = slowly(monkeypatch)
    side.start(sidecar.moves(LOAD))
    assert sidecar.heard() == [HELLO]
    sidecar.hang_up()
    os.unlink(sidecar.store.path)
    Path(sidecar.store.path).write_bytes(bytes(SLOTS * HELLO.block_bytes))
    moves = sidecar.moves(saves=(SAVE,), connection=2)
    side.start(moves)
    side.save(moves)
    go.set()
    assert ends(side) == {LOAD.request}
    assert side.take_bad_blocks() == {4, 6}
    assert sidecar.heard() == [HELLO, BlocksSaved("r", SAVE.slots)]  # no BlocksRead: it knows nothing of that load
    assert sidecar.slot(7) != bytes(HELLO.block_bytes)  # the new file
    assert sidecar.slot(3) == bytes(HELLO.block_bytes)


@pytest.mark.parametrize("way", ["no connection", "no listener", "no file", "no blocks"])
def test_loads_end_whatever_is_missing(side: WorkerSide, sidecar: Sidecar, way: str) -> None:
    moves = sidecar.moves(LOAD, saves=(SAVE,))
    if way == "no connection":
        moves = sidecar.moves(LOAD, saves=(SAVE,), connection=0)
    elif way == "no listener":
        sidecar.listener.close()
    elif way == "no file":
        os.unlink(sidecar.store.path)
    else:
        side = WorkerSide(lambda: HELLO, None)
    side.start(moves)
    side.save(moves)
    assert ends(side) == {LOAD.request}
    assert side.take_bad_blocks() == {4, 6}
    side.close()


def test_it_does_not_come_back_before_the_scheduler_does(side: WorkerSide, sidecar: Sidecar) -> None:
    """Slots in flight are of the worker that the scheduler still believes in."""
    side.start(sidecar.moves())
    assert sidecar.heard() == [HELLO]
    sidecar.hang_up()
    before = Path(sidecar.store.path).read_bytes()
    moves = sidecar.moves(saves=(SAVE,))
    side.start(moves)
    side.save(moves)
    assert sidecar.heard() == []
    assert Path(sidecar.store.path).read_bytes() == before
    side.start(sidecar.moves(connection=2))
    assert sidecar.heard() == [HELLO]


def test_a_load_that_failed_with_an_earlier_connection_leaves_the_new_one(
    side: WorkerSide, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("cut")

    go = slowly(monkeypatch, fail)
    side.start(sidecar.moves(LOAD))
    side.start(sidecar.moves(connection=2))
    go.set()
    assert ends(side) == {LOAD.request}
    assert side.take_bad_blocks() == {4, 6}
    moves = sidecar.moves(saves=(SAVE,), connection=2)
    side.start(moves)
    side.save(moves)
    sidecar.heard()  # of the first connection
    assert sidecar.heard()[-1:] == [BlocksSaved("r", SAVE.slots)]
