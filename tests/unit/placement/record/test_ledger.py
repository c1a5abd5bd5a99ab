"""What is written of decisions: who was considered at what cost, and what became of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from placement_build import a_core, a_record, an_ask
from placement_rig import Rig, tokens

from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import PlaceAsked, RecordDecision, WorkerRegistered
from kvfleet.placement.record.ledger import CANDIDATES_KEPT, KEPT, KEPT_IN_ALL, Considered, LedgerEntry
from kvfleet.placement.record.ledger_file import LedgerFile
from kvfleet.placement.workers.prompts import HashedPrompts
from kvproto import codec
from kvproto.messages import Decision, Explanation, Milestone, Milestones, Passed, Placement


def explained(rig: Rig, request: str, tenant: str | None = None) -> tuple[Decision, ...]:
    return rig.core.ledger.explain(request, tenant)


def test_a_decision_shows_candidates_terms_in_milliseconds_and_what_happened() -> None:
    rig = Rig(*(f"w{number:02}" for number in range(12)))
    ids = tokens(1, 1600)
    rig.store("w03", ids[:800])
    rig.beat("w05", queued=8000)
    placement = rig.place("r", ids)
    (decision,) = explained(rig, "r")
    assert decision.worker == placement.worker == "w03"
    assert decision.expected_hit == {"device": 800}
    assert decision.candidates_total == 12
    assert len(decision.candidates) == CANDIDATES_KEPT
    best, second = decision.candidates[:2]
    assert best.worker == "w03"
    assert best.terms["prefill"] == pytest.approx(100.0)
    assert second.terms["prefill"] == pytest.approx(200.0)
    assert best.matched == {"device": 800}
    for candidate in decision.candidates:
        assert sum(candidate.terms.values()) == pytest.approx(candidate.cost_ms, abs=0.01)
    assert [c.cost_ms for c in decision.candidates] == sorted(c.cost_ms for c in decision.candidates)
    assert not decision.actual.accepted
    rig.pass_("w03", "r", Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN, Passed.ENDED, prompt=1600, cached=640)
    actual = explained(rig, "r")[0].actual
    assert actual.accepted
    assert actual.ended
    assert actual.cached == {"device": 640}
    assert actual.ttft_s == actual.queue_s == actual.total_s == 0.1
    explanation = Explanation("p0", explained(rig, "r"))
    assert codec.decode(Explanation, codec.encode(explanation)) == explanation


def test_what_has_ended_is_forgotten_before_what_still_runs() -> None:
    core = a_core("w1")
    ended = 100
    for number in range(KEPT_IN_ALL + ended):
        (answer,) = core.handle(PlaceAsked("_INBOX.x", "public", an_ask(f"r{number}")), 0.01 * number)[:1]
        if number >= KEPT_IN_ALL - ended and number < KEPT_IN_ALL:
            worker = answer.placement.worker  # type: ignore[union-attr]
            over = Milestones(worker, "e1", (Milestone("public", f"r{number}", 0, Passed.ENDED),))
            core.handle(over, 0.01 * number)
    assert len(core.ledger) == KEPT_IN_ALL
    assert core.ledger.explain("r0"), "it still runs"
    assert not core.ledger.explain(f"r{KEPT_IN_ALL - 1}")
    core.ledger.check_integrity()


def test_each_attempt_has_a_decision_and_only_its_own_tenant_is_told() -> None:
    rig = Rig("w0", "w1")
    first = rig.place("r", tokens(1, 64))
    rig.place("r", tokens(1, 64), attempt=1, excluded=(first.worker,))
    assert [decision.attempt for decision in explained(rig, "r", "public")] == [0, 1]
    assert explained(rig, "r", "another") == ()
    assert explained(rig, "unknown") == ()


def test_a_named_worker_that_is_no_candidate_is_explained_too() -> None:
    rig = Rig("w0", "w1")
    rig.place("r", tokens(1, 64), policy="direct", worker="w1", excluded=("w1",))
    (decision,) = explained(rig, "r")
    assert (decision.policy, decision.worker, decision.candidates_total) == ("direct", "w1", 1)


def test_attained_attainable_and_lost_tokens_are_counted_of_what_started() -> None:
    rig = Rig("w0", "w1")
    ids = tokens(1, 1600)
    rig.store("w0", ids)
    rig.beat("w0", queued=8000 * 60)
    assert rig.place("r", ids).worker == "w1"
    hits = rig.core.ledger.hits
    assert hits.prompt_total == 0
    for _ in range(2):  # said twice
        rig.pass_("w1", "r", Passed.STARTED, prompt=1600)
    assert (hits.prompt_total, hits.attained_total, hits.attainable_total, hits.lost_total) == (1600, 0, 1599, 1599)
    rig.pass_("w0", "r", Passed.STARTED, prompt=1600, cached=1599)  # another worker's word for it counts for nothing
    assert hits.attained_total == 0


def test_it_keeps_the_last_that_ended_and_all_that_have_not_up_to_a_limit() -> None:
    rig = Rig("w0")
    for number in range(KEPT + 10):
        rig.place(f"r{number}", tokens(1, 8))
    assert len(rig.core.ledger) == KEPT + 10
    for number in range(KEPT + 10):
        rig.pass_("w0", f"r{number}", Passed.ENDED)
    assert len(rig.core.ledger) == KEPT
    assert explained(rig, "r9") == ()
    assert explained(rig, "r10")
    rig.core.ledger.check_integrity()


def test_requests_that_never_end_are_forgotten_too() -> None:
    core = a_core("w0")
    for number in range(KEPT_IN_ALL + 5):
        core.ledger.note(an_entry(f"r{number}"))
    assert len(core.ledger) == KEPT_IN_ALL
    core.ledger.check_integrity()


def an_entry(request: str) -> LedgerEntry:
    nothing = Considered((), None, np.zeros((3, 0)))
    return LedgerEntry("t", "m", 0, Placement(request, "w0", 0), 1, nothing, 0, {}, 0, b"", 16)


def recording() -> PlacementCore:
    core = PlacementCore(
        "p1",
        "_plc.p1",
        lambda: 0.5,
        PlacementConfig(index_blocks=4096, keeps_hashes=True, shares=False),
        prompts=HashedPrompts(b"key"),
        unix_ms=lambda: 5_000,
    )
    core.handle(WorkerRegistered(a_record("w0")), 0.0)
    return core


async def test_a_ledgers_file_has_a_line_for_each_request_that_ended(tmp_path: Path) -> None:
    core, path = recording(), tmp_path / "ledger.jsonl"
    file = LedgerFile(path)
    for number in range(2):
        core.handle(PlaceAsked("_INBOX.x", "public", an_ask(f"r{number}", prompt_ids=tokens(1, 40))), 1.0)
        done = Milestone("public", f"r{number}", 0, Passed.ENDED, 2.0, output_tokens=7)
        for action in core.handle(Milestones("w0", "e1", (done,)), 3.0):
            assert isinstance(action, RecordDecision)
            file.write(action)
    await file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request"] for line in lines] == ["r0", "r1"]
    assert (lines[0]["timestamp"], lines[0]["input_length"], lines[0]["output_length"]) == (0, 40, 7)
    assert lines[0]["block_tokens"] == 16
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"]
    assert len(lines[0]["hash_ids"]) == 2
    assert all(len(bytes.fromhex(one)) == 16 for one in lines[0]["hash_ids"])


def test_without_a_file_no_hashes_are_kept() -> None:
    core = a_core("w0")
    core.handle(PlaceAsked("_INBOX.x", "public", an_ask("r", prompt_ids=tokens(1, 64))), 1.0)
    assert all(not entry.hashes for entry in core.ledger.entries.values())
