"""What is brought back: whole blocks beyond vLLM's own, never all of a request, once."""

from __future__ import annotations

import pytest

from kvfleet_vllm.block_moves import LoadBlocks
from kvfleet_vllm.cache_groups import NONE, CacheGroups
from kvfleet_vllm.restore_plan import RestorePlan

BLOCKS = (list(range(100, 140)),)


def plan(at: int = 0, count: int = 4, size: int = 32) -> RestorePlan:
    """Slots 10, 11, ... have the blocks from `at` on."""
    one = RestorePlan(CacheGroups(size))
    one.offer("v", "r", at, tuple(range(10, 10 + count)))
    return one


@pytest.mark.parametrize(
    ("at", "count", "size", "cached", "tokens", "brought"),
    [
        (0, 4, 32, 0, 200, 128),
        (0, 8, 16, 0, 200, 128),
        (0, 4, 32, 32, 200, 96),
        (0, 4, 32, 128, 200, 0),  # vLLM has it all
        (0, 4, 32, 160, 200, 0),  # and more
        (0, 4, 32, 0, 129, 128),
        (0, 4, 32, 0, 128, 96),  # the last token is computed
        (0, 4, 32, 0, 33, 32),  # far beyond the prompt
        (0, 4, 32, 0, 32, 0),
        (0, 4, 32, 0, 1, 0),
        (2, 2, 32, 64, 200, 64),
        (2, 2, 32, 96, 200, 32),
        (2, 2, 32, 32, 200, 0),  # vLLM lost what lies before
    ],
)
def test_whole_blocks_that_follow_vllms_own(
    at: int, count: int, size: int, cached: int, tokens: int, brought: int
) -> None:
    one = plan(at, count, size)
    assert one.restorable("v", cached, tokens) == brought
    assert one.restorable("v", cached, tokens) == brought  # it may ask again
    assert one.restorable("other", cached, tokens) == 0
    one.allocated("v", BLOCKS, brought)
    loads, given_up = one.step()
    if brought:
        first, end = cached // size, (cached + brought) // size
        slots = tuple(range(10 + first - at, 10 + end - at))
        assert loads == (LoadBlocks("v", "r", tuple(BLOCKS[0][first:end]), slots),)
        assert given_up == ()
        assert one.own == {"v": cached}
    else:
        assert (loads, given_up, one.own) == ((), ("r",), {})


def test_it_is_promised_once_also_after_a_preemption_or_a_failed_load() -> None:
    one = plan()
    assert one.restorable("v", 0, 200) == 128
    one.allocated("v", BLOCKS, 128)
    one.allocated("v", BLOCKS, 0)  # again, when the load has ended
    assert one.restorable("v", 0, 200) == 0
    assert one.own == {}
    one.allocated("v", BLOCKS, 0)
    assert len(one.step()[0]) == 1
    assert one.step() == ((), ())


def test_vllm_may_wait_for_room_and_then_need_less() -> None:
    one = plan()
    assert one.restorable("v", 0, 200) == 128
    assert one.restorable("v", 64, 200) == 64
    one.allocated("v", BLOCKS, 64)
    assert one.step()[0] == (LoadBlocks("v", "r", (102, 103), (12, 13)),)
    assert one.own == {"v": 64}


def test_vllm_may_refuse() -> None:
    one = plan()
    assert one.restorable("v", 0, 200) == 128
    one.allocated("v", BLOCKS, 0)
    assert one.step() == ((), ("r",))
    assert one.own == {}
    assert one.restorable("v", 0, 200) == 0


@pytest.mark.parametrize("loading", [False, True])
def test_an_aborted_request_ends_its_load_or_gives_it_up(loading: bool) -> None:
    one = plan()
    one.restorable("v", 0, 200)
    if loading:
        one.allocated("v", BLOCKS, 128)
    one.finished("v")
    loads, given_up = one.step()
    assert (len(loads), given_up) == ((1, ()) if loading else (0, ("r",)))
    assert one.own == {}
    one.finished("v")
    assert one.step() == ((), ())
    one.ended(["v"], set())
    assert one._loading == {}


def test_whose_load_failed() -> None:
    one = plan()
    one.offer("w", "s", 0, (1,))
    for name, blocks in (("v", [4, 5, 6, 7]), ("w", [8])):
        one.restorable(name, 0, 200)
        one.allocated(name, [blocks], 32 * len(blocks))
    assert one.ended([], {6}) == ["v"]  # one rank's news, the others have not ended
    assert one.ended(["w"], set()) == []
    assert one.ended(["v"], {8}) == []


def test_a_worker_that_is_gone_takes_its_offers_along() -> None:
    one = plan()
    one.offer("w", "s", 0, (1,))
    one.offer("x", "t", 0, (3,))
    one.restorable("w", 0, 200)
    one.allocated("w", [[8]], 32)
    one.finished("x")
    one.forget()
    assert one.restorable("v", 0, 200) == 0
    assert one.step() == ((LoadBlocks("w", "s", (8,), (1,)),), ())  # vLLM waits for its end


GROUPS = CacheGroups(32, (2, 3), (0, 1))


def hybrid(state: tuple[int, ...] = (20,)) -> RestorePlan:
    one = RestorePlan(GROUPS)
    one.offer("v", "r", 0, (10, 11, 12, 13), state)
    return one


def test_blocks_of_groups_and_the_state_behind_them() -> None:
    """vLLM has no room for what lies before a window or the state."""
    one = hybrid()
    assert one.restorable("v", 32, 200) == 96
    tables = [[0, 0, 0, 7], [0, 0, 0, 8], [1, 2, 3, 4], [0, 0, 5, 6]]
    one.allocated("v", tables, 96)
    (load,), given_up = one.step()
    assert load == LoadBlocks("v", "r", (2, NONE, 3, 5, 4, 6, 7, 8), (11, 12, 13, 20))
    assert given_up == ()
    assert one.ended([], (), {"v"}) == ["v"]
    assert one.ended(["v"], ()) == []


@pytest.mark.parametrize(
    ("state", "cached", "tokens"),
    [
        ((20,), 0, 128),  # it would need the state of an earlier block
        ((), 0, 200),
        ((20, 21), 0, 200),  # of another model
        ((20,), 128, 200),
        ((20,), 16, 200),  # the rest of that block may be another request's
    ],
)
def test_with_states_all_is_brought_or_nothing(state: tuple[int, ...], cached: int, tokens: int) -> None:
    one = hybrid(state)
    assert one.restorable("v", cached, tokens) == 0
    one.allocated("v", (), 0)
    assert one.step() == ((), ("r",))
