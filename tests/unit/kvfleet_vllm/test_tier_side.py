"""vLLM's tier and the worker beside it: chunks of vLLM's host memory, a real socket and file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvfleet_vllm import tier_side
from kvfleet_vllm.block_copies import LayerBlocks
from kvfleet_vllm.cache_groups import CacheGroups
from kvfleet_vllm.tier_side import TierMove, TierSide
from kvfleet_vllm.wire import (
    VERSION,
    BlocksErased,
    BlocksRead,
    BlocksSaved,
    BlocksSaving,
    EngineHello,
    EngineStep,
    EraseBlocks,
    GrantSlots,
    Scheduled,
    WorkerHello,
)
from tests.support.tier_sidecar import TOKENS, TierSidecar, step_of

CHUNKS, SLOTS, SIZE = 8, 12, 256
HELLO = EngineHello(VERSION, "i", 1, "0", {"tier": True})
V, W = "generate-tokens-v-00000000", "generate-tokens-w-00000000"


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[TierSidecar]:
    one = TierSidecar(tmp_path, SLOTS, SIZE)
    yield one
    one.close()


@pytest.fixture
def host() -> torch.Tensor:
    return torch.randint(0, 256, (CHUNKS, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def side_of(host: torch.Tensor, *formats: bytes, layout: bytes = b"l") -> TierSide:
    side = TierSide(lambda: HELLO, lambda: 0.0, CacheGroups(TOKENS), max(1, len(formats)))
    side.pool = SimpleNamespace(blocks=[], evict_blocks=lambda blocks: None)
    side.attach(LayerBlocks({"chunks": host}, CHUNKS), layout)
    side.formats = dict(enumerate(formats))
    return side


@pytest.fixture
def side(host: torch.Tensor) -> Iterator[TierSide]:
    one = side_of(host, b"f")
    yield one
    one.close()
    one.detach()


def moved(side: TierSide, within: float = 10.0) -> list[TierMove]:
    """Copies take no time."""
    until = time.monotonic() + within
    while not (found := side.moved()):
        assert time.monotonic() < until
    return [TierMove(one.job, one.is_done, one.blocks) for one in found]


def content(host: torch.Tensor, chunk: int) -> bytes:
    return host[chunk].numpy().tobytes()


def slowly(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None] = lambda: None) -> threading.Event:
    """Copies wait for the event, and do something before."""
    go, copied = threading.Event(), tier_side._copied

    def wait(*arguments: object) -> float:
        assert go.wait(10)
        meanwhile()
        return copied(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tier_side, "_copied", wait)
    return go


def test_it_greets_as_the_only_rank(side: TierSide, sidecar: TierSidecar) -> None:
    side.request_added(sidecar.request("v", 40))
    hello, worker = sidecar.heard()
    assert hello == HELLO
    assert isinstance(worker, WorkerHello)
    assert (worker.version, worker.rank, worker.ranks, worker.block_bytes) == (VERSION, 0, 1, SIZE)
    assert len(worker.format) == 16


def test_the_format_is_of_all_ranks_and_the_chunks(host: torch.Tensor, sidecar: TierSidecar) -> None:
    told = {}
    for formats, layout in (
        ((b"f",), b"l"), ((b"f",), b"m"), ((b"g",), b"l"), ((b"f", b"g"), b"l"), ((b"g", b"f"), b"l"),
        ((b"f", b""), b"l"), ((), b"l"),
    ):  # fmt: skip
        side = side_of(host, *formats, layout=layout)
        side.request_added(sidecar.request("v", 40))
        told[formats, layout] = sidecar.heard()[1].format  # type: ignore[union-attr]
        side.close()
        side.detach()
    assert [key for key, one in told.items() if not one] == [((b"f", b""), b"l"), ((), b"l")]
    assert len(set(told.values())) == len(told) - 1
    assert b"f" not in told.values()


def test_blocks_are_brought_once(side: TierSide, sidecar: TierSidecar, host: torch.Tensor) -> None:
    before = host.clone()
    request = sidecar.request("v", 100, at=1, slots=[7, 3, 9])
    side.request_added(request)
    assert [side.offers(V, block) for block in range(-1, 5)] == [False, False, True, True, True, False]
    assert not side.offers(W, 1)
    assert side.restorable(request, 16) == 0
    side.load(5, V, {1: 6, 2: 0, 3: 4})
    assert not side.offers(V, 1)  # its slots are free for others when it is done
    side.load(6, V, {1: 6})
    side.drain()
    assert sorted(moved(side), key=lambda one: one.job) == [TierMove(5, True, 3), TierMove(6, False)]
    assert sidecar.heard()[2:] == [BlocksRead("v", 3, 0.0)]
    assert [content(host, chunk) for chunk in (6, 0, 4)] == [sidecar.slot(slot) for slot in (7, 3, 9)]
    assert all(torch.equal(host[chunk], before[chunk]) for chunk in (1, 2, 3, 5, 7))
    side.allocated(request, (), 0)
    side.step(step_of(request, cached=64))
    assert sidecar.heard() == [EngineStep(0.0, 1, 36, 36, ()), Scheduled("v", 16, 48)]


def test_what_vllm_does_not_need_is_given_up(side: TierSide, sidecar: TierSidecar) -> None:
    for name in ("v", "w"):
        side.request_added(sidecar.request(name, 40, slots=[1, 2]))
    side.allocated(sidecar.request("v", 40), (), 0)
    side.request_finished(W)
    side.step(step_of())
    assert sidecar.heard()[2:] == [BlocksRead("v", 0, 0.0), BlocksRead("w", 0, 0.0)]
    assert not side.offers(V, 0)


def saving(side: TierSide, sidecar: TierSidecar, *slots: int, save_from: int = 1) -> None:
    side.request_added(sidecar.request("v", 100, save_from=save_from))
    sidecar.heard()
    sidecar.say(GrantSlots(slots))
    side.step(step_of())


def test_a_chain_is_saved_from_where_it_is_wanted(side: TierSide, sidecar: TierSidecar, host: torch.Tensor) -> None:
    before = sidecar.slot(11)
    saving(side, sidecar, 4, 8, 2, 11)
    assert side.wants(V)
    assert not side.wants(W)
    side.save(1, V, {2: 5, 0: 3, 1: 7})  # vLLM's keys have no order
    assert moved(side) == [TierMove(1, True, 2)]
    assert sidecar.heard() == [BlocksSaving("v", 1, (4, 8)), BlocksSaved("v", (4, 8))]
    side.save(2, V, {1: 7, 4: 1})  # one again, and one beyond a gap
    assert moved(side) == [TierMove(2, True, 0)]
    side.save(3, W, {0: 0})
    assert moved(side) == [TierMove(3, True, 0)]
    side.request_finished(V)
    side.save(4, V, {3: 6})  # vLLM stores a little later
    assert moved(side) == [TierMove(4, True, 1)]
    assert sidecar.heard() == [BlocksSaving("v", 3, (2,)), BlocksSaved("v", (2,))]
    assert [sidecar.slot(slot) for slot in (4, 8, 2)] == [content(host, chunk) for chunk in (7, 5, 6)]
    assert sidecar.slot(11) == before
    side.no_more(V)
    assert not side.wants(V)


def test_a_chain_ends_where_slots_do(side: TierSide, sidecar: TierSidecar) -> None:
    saving(side, sidecar, 4, save_from=0)
    side.save(1, V, {0: 1, 1: 2})
    assert moved(side) == [TierMove(1, True, 1)]
    sidecar.say(GrantSlots((5,)))
    side.step(step_of())
    side.save(2, V, {2: 3})
    assert moved(side) == [TierMove(2, True, 0)]


def test_nothing_holds_up_vllm(side: TierSide, sidecar: TierSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    go = slowly(monkeypatch)
    saving(side, sidecar, 4)
    side.request_added(sidecar.request("w", 100, slots=[1]))
    side.save(1, V, {1: 1})
    side.load(2, W, {0: 2})
    assert side.moved() == []
    assert sidecar.heard() == []  # a save that fails leaves nothing behind
    threading.Timer(0.1, go.set).start()
    side.drain()
    assert sorted(one.job for one in side.moved()) == [1, 2]
    assert len(sidecar.heard()) == 3


@pytest.mark.parametrize("way", ["cut", "no slots"])
def test_a_copy_that_fails(side: TierSide, sidecar: TierSidecar, way: str, host: torch.Tensor) -> None:
    saving(side, sidecar, 4, 5)
    slots = [1, 2] if way == "cut" else [1, SLOTS]
    side.request_added(sidecar.request("w", 100, slots=slots, save_from=0))
    before = host.clone()
    if way == "cut":
        os.truncate(sidecar.file, 100)
    side.load(1, W, {0: 2, 1: 3})
    assert moved(side) == [TierMove(1, False, 2)]
    assert sidecar.heard() == [BlocksRead("w", 0, 0.0)]
    assert torch.equal(host, before)
    assert not side.wants(W)
    side.save(2, V, {1: 1})  # the memory is not to be trusted
    assert moved(side) == [TierMove(2, True, 0)]
    side.request_added(sidecar.request("x", 100, slots=[1]))
    assert not side.offers("generate-tokens-x-00000000", 0)


def test_a_save_that_fails_ends_the_chain(side: TierSide, sidecar: TierSidecar) -> None:
    saving(side, sidecar, 4, 5)
    os.truncate(sidecar.file, 100)
    side.save(1, V, {1: 1})
    assert moved(side) == [TierMove(1, False, 1)]
    assert sidecar.heard() == []
    assert not side.wants(V)


def test_a_worker_that_goes_during_copies(
    side: TierSide, sidecar: TierSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = slowly(monkeypatch, sidecar.hang_up)
    saving(side, sidecar, 4, 5)
    side.request_added(sidecar.request("w", 100, slots=[1], save_from=0))
    side.load(1, W, {0: 2})
    go.set()
    assert moved(side) == [TierMove(1, False, 1)]  # another's bytes may have been in the slot
    side.save(2, V, {1: 1})
    assert moved(side) == [TierMove(2, True, 0)]


def test_a_worker_that_comes_back_knows_nothing_of_before(
    side: TierSide, sidecar: TierSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = slowly(monkeypatch)
    saving(side, sidecar, 4, 5)
    side.request_added(sidecar.request("w", 100, slots=[1], save_from=0))
    side.load(1, W, {0: 2})
    side.save(2, V, {1: 1})
    sidecar.hang_up()
    side.step(step_of())
    side.request_added(sidecar.request("x", 100, slots=[1, 3], save_from=0))
    assert not side.wants(V)
    go.set()
    side.drain()
    assert sorted((one.job, one.is_done) for one in side.moved()) == [(1, False), (2, True)]
    hello, worker = sidecar.heard()  # neither BlocksRead nor BlocksSaved
    assert (hello, type(worker)) == (HELLO, WorkerHello)
    assert side.offers("generate-tokens-x-00000000", 0)
    side.save(3, "generate-tokens-x-00000000", {0: 1})
    assert moved(side) == [TierMove(3, True, 0)]  # the slots were granted by the one before
    side.load(4, "generate-tokens-x-00000000", {0: 1})
    assert moved(side) == [TierMove(4, True, 1)]


def test_an_order_to_erase_waits_for_vllm_and_empties_its_host_memory(side: TierSide, sidecar: TierSidecar) -> None:
    forgotten = []
    side.forget_host = lambda: forgotten.append(True)
    side.request_added(sidecar.request("v", 100))
    sidecar.heard()
    sidecar.say(EraseBlocks(3, ()))
    assert side.moved() == []  # in the middle of vLLM's scheduling
    assert not forgotten
    side.request_added(sidecar.request("w", 100))
    assert forgotten == [True]
    assert sidecar.heard() == [BlocksErased(3, 0)]


def test_blocks_that_cannot_be_moved(host: torch.Tensor, sidecar: TierSidecar) -> None:
    side = TierSide(lambda: HELLO, lambda: 0.0)
    request = sidecar.request("v", 100, slots=[1], save_from=0)
    side.request_added(request)
    assert sidecar.heard() == [HELLO, WorkerHello(VERSION, 0, 1, b"", 0)]
    assert (side.offers(V, 0), side.wants(V)) == (False, False)
    side.close()
    side.detach()
