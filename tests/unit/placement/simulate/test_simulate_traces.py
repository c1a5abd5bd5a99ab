"""What is read as a trace: Mooncake's lines, and what placement itself wrote."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest
from placement_build import FLEET_KEY, MODEL, PREFIX, a_record
from simulate_build import conversations

from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Answer, PlaceAsked, RecordDecision, WorkerRegistered
from kvfleet.placement.record.ledger_file import LedgerFile
from kvfleet.placement.simulate.figures import attainable_tokens
from kvfleet.placement.simulate.trace import Trace, parse_trace, read_trace
from kvfleet.placement.workers.prompts import HashedPrompts
from kvproto.errors import InvalidRequest
from kvproto.messages import Milestone, Milestones, Passed, PlaceRequest

LINE = {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 9, 2]}


def lines(*changes: dict[str, object]) -> list[str]:
    return [json.dumps(LINE | one) for one in changes]


def ledger_line(request: str, **changes: object) -> str:
    row = {"unix_ms": 5_000, "tenant": "t", "request": request, "attempt": 0, "block_tokens": 16, "hash_ids": ["aa"]}
    return json.dumps(LINE | row | changes)


class TestMooncake:
    def test_lengths_times_and_blocks(self) -> None:
        trace = parse_trace(lines({}, {"timestamp": 3500, "hash_ids": [4, 9, 5], "output_length": 0}))
        first, second = trace.arrivals
        assert (first.at_s, second.at_s, trace.duration_s) == (0.0, 2.5, 2.5)
        assert (first.prompt_tokens, first.output_tokens, second.output_tokens) == (1100, 7, 1)
        assert first.ids[:2] == second.ids[:2]
        assert (trace.block_tokens, trace.distinct_blocks) == (512, 4)
        assert (first.hashes[:2] == second.hashes[:2]).all()

    def test_order_is_that_of_time(self) -> None:
        trace = parse_trace(lines({"timestamp": 9000}, {"timestamp": 0}, {"timestamp": 4000}))
        assert [arrival.at_s for arrival in trace.arrivals] == [0.0, 4.0, 9.0]
        assert [arrival.number for arrival in trace.arrivals] == [0, 1, 2]

    def test_a_limit_takes_the_first(self) -> None:
        asked = lines({"timestamp": 9000}, {"timestamp": 0}, {"timestamp": 4000})
        assert [arrival.at_s for arrival in parse_trace(asked, 2).arrivals] == [0.0, 4.0]

    def test_what_a_coarse_clock_gathered_can_be_spread(self) -> None:
        trace = parse_trace(lines(*({"timestamp": at} for at in (0, 0, 0, 3000, 3000, 4000, 4000)))).spread()
        assert [arrival.at_s for arrival in trace.arrivals] == [0.0, 1.0, 2.0, 3.0, 3.5, 4.0, 4.0]
        assert [arrival.number for arrival in trace.arrivals] == list(range(7))

    def test_turns_of_a_conversation_are_one_session(self) -> None:
        paths = [[0, 1, 2, 3], [0, 7, 8, 9], [0, 1, 2, 4, 5], [0, 7, 8, 10], [11, 12, 13]]
        asked = lines(*({"timestamp": n, "hash_ids": path} for n, path in enumerate(paths)))
        sessions = [arrival.session for arrival in parse_trace(asked).arrivals]
        assert sessions[0] == sessions[2]
        assert sessions[1] == sessions[3]
        assert len(set(sessions)) == 3

    @pytest.mark.parametrize("packed", [False, True])
    def test_files_plain_and_packed(self, tmp_path: Path, packed: bool) -> None:
        path = tmp_path / ("t.jsonl.gz" if packed else "t.jsonl")
        text = "\n".join(lines({}, {})) + "\n\n"
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        assert len(read_trace(path).arrivals) == 2


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "7", '"text"', "{}", json.dumps(LINE | {"input_length": -1}), json.dumps(LINE | {"hash_ids": "abc"}),
        json.dumps(LINE | {"timestamp": None}), json.dumps(LINE | {"input_length": "many"}),
        json.dumps(LINE | {"timestamp": 1e999}), json.dumps(LINE | {"block_tokens": 0}),
        json.dumps(LINE | {"output_length": 1e999}),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(InvalidRequest, match="line 2 is no request of a trace"):
        parse_trace([json.dumps(LINE), line])


class TestWhatIsNoTrace:
    def test_nothing(self) -> None:
        with pytest.raises(InvalidRequest, match="empty"):
            parse_trace(["", "\n"])

    @pytest.mark.parametrize(
        "data",
        [b"not packed at all", gzip.compress(b"x" * 9999)[:40], gzip.compress(b"\xff\xfe\x00")],
        ids=["plain", "cut short", "no text"],  # gzip writes the time
    )
    def test_other_bytes(self, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "t.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(InvalidRequest):
            read_trace(path)

    def test_blocks_of_two_sizes(self) -> None:
        with pytest.raises(InvalidRequest, match="line 2 has blocks of 32 tokens, those before it of 16"):
            parse_trace([ledger_line("a"), ledger_line("b", block_tokens=32)])


class TestLedger:
    def test_the_last_attempt_counts(self) -> None:
        again = ledger_line("a", attempt=2, input_length=40, unix_ms=7000)
        for asked in (
            [ledger_line("a"), ledger_line("b"), again],
            [again, ledger_line("a"), ledger_line("b"), ledger_line("a", attempt=1)],
        ):
            trace = parse_trace(asked)
            assert [arrival.prompt_tokens for arrival in trace.arrivals] == [1100, 40]

    def test_tenants_have_requests_of_their_own(self) -> None:
        assert len(parse_trace([ledger_line("a"), ledger_line("a", tenant="other")]).arrivals) == 2

    def test_files_of_several_replicas_share_one_clock(self) -> None:
        trace = parse_trace([ledger_line("a", timestamp=0, unix_ms=9000), ledger_line("b", timestamp=0, unix_ms=5000)])
        assert [arrival.at_s for arrival in trace.arrivals] == [0.0, 4.0]

    def test_text_has_no_hashes_and_no_session(self) -> None:
        trace = parse_trace([ledger_line(name, hash_ids=[], input_length=0) for name in "ab"])
        assert trace.distinct_blocks == 0
        assert len({arrival.session for arrival in trace.arrivals}) == 2
        assert all(arrival.prompt_tokens == 1 for arrival in trace.arrivals)


def record(trace: Trace, path: Path, block_size: int) -> None:
    """The trace's prompts as token ids through a real core, each ended at once; a text prompt last."""
    unix_ms = 1_700_000_000_000
    core = PlacementCore(
        "p1",
        PREFIX,
        lambda: 0.0,
        PlacementConfig(index_blocks=4096, keeps_hashes=True),
        prompts=HashedPrompts(FLEET_KEY),
        unix_ms=lambda: unix_ms,
    )
    core.handle(WorkerRegistered(a_record("w0")), 0.0)
    ledger = LedgerFile(path)
    asks = [
        PlaceRequest(f"r{one.number}", MODEL, prompt_ids=tuple(b for b in one.ids for _ in range(block_size)))
        for one in trace.arrivals
    ]
    for number, ask in enumerate([*asks, PlaceRequest("text", MODEL, prompt="x" * 400)]):
        unix_ms += 250
        answers = core.handle(PlaceAsked("", "public", ask), number)
        assert isinstance(answers[0], Answer)
        ended = Milestone("public", ask.request, 0, Passed.ENDED, 1.0, 0, {}, 5)
        for action in core.handle(Milestones("w0", "e1", (ended,)), number):
            assert isinstance(action, RecordDecision)
            ledger.write(action)
    asyncio.run(ledger.close())


def test_what_placement_wrote_is_read_as_it_was(tmp_path: Path) -> None:
    """As many tokens can be hit in the ledger as in the traffic it was recorded from."""
    path, block_size = tmp_path / "ledger.jsonl", a_record("w0").block_size
    record(conversations(60), path, block_size)
    asked, read = conversations(60), read_trace(path)
    *turns, text = read.arrivals
    assert [len(one.ids) for one in turns] == [len(one.ids) for one in asked.arrivals]
    assert [one.prompt_tokens for one in turns] == [len(one.ids) * block_size for one in asked.arrivals]
    assert read.block_tokens == block_size
    assert read.duration_s == pytest.approx(0.25 * 60)
    assert read.distinct_blocks == asked.distinct_blocks
    assert [one.output_tokens for one in turns] == [5] * 60
    assert (text.ids, text.prompt_tokens) == ((), 100)
    shared = [
        sum(block in {b for earlier in trace.arrivals[:n] for b in earlier.ids} for block in one.ids)
        for trace in (asked, read)
        for n, one in enumerate(trace.arrivals[:60])
    ]
    assert shared[:60] == shared[60:]
    assert attainable_tokens(read, 10_000) > 0
