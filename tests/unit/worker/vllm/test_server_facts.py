"""What a server's facts mean for a worker. What is refused in whole is in `test_vllm_server`."""

from __future__ import annotations

from typing import Any

import pytest

from kvfleet.worker.vllm.server_facts import EventAddresses, ServerFacts, is_known, missing_flags
from kvfleet_vllm.wire import VERSION, EngineHello
from tests.support.vllm_double.made_with import MadeWith

GOOD = MadeWith("tcp://worker:5557", "tcp://*:5558", "/models/m").facts()


def of(**other: Any) -> ServerFacts:
    return ServerFacts.of(EngineHello(VERSION, "i", 1, "0.32.0", GOOD | other), "m", [])


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.31.0", True), ("0.32.1rc2+cpu", True), ("0.33.0", False), ("0.30.9", False), ("1.31.0", False),
     ("", False), ("dev", False), ("0.x", False), ("0", False)],
)  # fmt: skip
def test_releases_that_were_tried(version: str, known: bool) -> None:
    assert is_known(version) is known


@pytest.mark.parametrize(
    ("fact", "value"),
    [("max_logprobs", -1), ("max_logprobs", 500), ("async_scheduling", None), ("enable_prefix_caching", None),
     ("logits_processors", ["x:Y", "kvfleet_vllm.slot_sampler:SlotSampler"])],
)  # fmt: skip
def test_flags_that_will_do(fact: str, value: Any) -> None:
    assert missing_flags(GOOD | {fact: value}) == []


@pytest.mark.parametrize("part", ["enabled", "publisher", "endpoint", "replay_endpoint", "topic"])
def test_each_part_of_the_events_flag_is_needed(part: str) -> None:
    (flag,) = missing_flags(GOOD | {"kv_events": GOOD["kv_events"] | {part: None}})
    assert flag.startswith("--kv-events-config")


def test_nothing_told_at_all() -> None:
    assert len(missing_flags({})) == 4  # a vLLM that does not tell of caching and scheduling may have both right


@pytest.mark.parametrize(
    ("endpoint", "replay", "seen"),
    [
        ("tcp://10.0.0.9:5557", "tcp://*:5558", ("tcp://10.0.0.9:5557", "tcp://box:5558", True)),
        ("tcp://*:5557", "tcp://*:5558", ("tcp://box:5557", "tcp://box:5558", False)),
        ("tcp://0.0.0.0:5557", "tcp://[::]:5558", ("tcp://box:5557", "tcp://box:5558", False)),
        ("ipc:///run/e", "ipc:///run/r", ("ipc:///run/e", "ipc:///run/r", False)),
    ],
)
def test_where_events_come_from(endpoint: str, replay: str, seen: tuple[str, str, bool]) -> None:
    events = {"endpoint": endpoint, "replay_endpoint": replay, "topic": "kv"}
    at = EventAddresses.of(events, "http://box:8000")
    assert (at.endpoint, at.replay, at.binds) == seen


def test_a_restart_with_more_memory_or_another_release_is_no_other_server() -> None:
    assert of(num_gpu_blocks=7, max_num_seqs=3, revision="x").changes(of()) == []
    assert of(max_model_len=5, dtype="bfloat16").changes(of()) == [
        "context_length 5, it was 1024",
        "dtype 'bfloat16', it was 'float32'",
    ]
