"""What a worker asks of vLLM; what is not understood moves no blocks, and does no other harm."""

from __future__ import annotations

from typing import Any

import pytest

from kvfleet_vllm.block_moves import SharedStore
from kvfleet_vllm.request_params import RequestParams, params_of
from kvfleet_vllm.wire import VERSION

STORE = {"path": "/dev/shm/x", "slots": 64, "block_tokens": 16}


def asked(**more: Any) -> Any:
    return params_of({"kvfleet": {"version": VERSION, "socket": "/s", **more}}, 16)


def test_all_of_it() -> None:
    assert asked(store=STORE, restore={"at": 2, "slots": [4, 5]}, save_from=4) == RequestParams(
        "/s", SharedStore("/dev/shm/x", 64), 2, (4, 5), (), 4
    )


def test_the_state_behind_the_blocks() -> None:
    one = asked(store=STORE, restore={"at": 0, "slots": [4, 5], "state": [9]})
    assert (one.restore_slots, one.restore_state) == ((4, 5), (9,))


def test_each_part_may_be_left_out() -> None:
    assert asked() == RequestParams("/s")
    assert asked(store=STORE) == RequestParams("/s", SharedStore("/dev/shm/x", 64))
    assert asked(store=STORE, restore=None, save_from=0).save_from == 0
    assert asked(restore={"at": 0, "slots": [1]}, save_from=0) == RequestParams("/s")


@pytest.mark.parametrize(
    "more",
    [
        {"store": "text"},
        {"store": {}},
        {"store": {**STORE, "block_tokens": 32}},
        {"store": {**STORE, "slots": -1}},
        {"store": {**STORE, "path": 5}},
        {"store": STORE, "restore": [1]},
        {"store": STORE, "restore": {"at": -2, "slots": [1]}},
        {"store": STORE, "restore": {"at": 0, "slots": ["1"]}},
        {"store": STORE, "restore": {"at": 0, "slots": 7}},
        {"store": STORE, "restore": {"at": 0, "slots": [1], "state": [-1]}},
        {"store": STORE, "save_from": "4"},
    ],
)
def test_what_is_not_understood_moves_nothing(more: Any) -> None:
    assert asked(**more) == RequestParams("/s")


@pytest.mark.parametrize(
    "params", [None, {}, {"other": 1}, {"kvfleet": None}, {"kvfleet": {"version": VERSION + 1, "socket": "/s"}},
               {"kvfleet": {"version": VERSION}}, {"kvfleet": {"version": VERSION, "socket": 5}}],
)  # fmt: skip
def test_other_parameters_name_no_worker(params: Any) -> None:
    assert params_of(params, 16) is None
