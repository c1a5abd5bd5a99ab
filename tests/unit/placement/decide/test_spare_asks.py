"""Work that may wait: where it may go, what its refusal means, and what is remembered of it without a worker."""

from __future__ import annotations

from placement_build import MODEL, an_ask
from placement_rig import RATE, Rig, tokens

from kvfleet.placement.advice.questions import preload
from kvfleet.placement.events import Answer, Fail, PlaceAsked, WorkerLeft
from kvproto.messages import (
    SPARE_PRIORITY,
    BookedBatch,
    Heartbeat,
    Load,
    PreloadRequest,
    PriorityLoad,
    Rates,
    State,
    Tier,
)


def ask(rig: Rig, request: str, **fields: object) -> Answer | Fail:
    said = {"spare": True, "priority": SPARE_PRIORITY, "prompt_ids": tokens(1, 64)} | fields
    actions = rig.core.handle(PlaceAsked("_INBOX.x", "public", an_ask(request, **said)), rig.now)
    refused = [one.refused for one in actions if isinstance(one, BookedBatch)]
    (answer,) = [one for one in actions if isinstance(one, Answer | Fail)]
    if isinstance(answer, Fail) and answer.failed.code == "overloaded":
        assert refused in ([], [()])  # no demand for more workers
    return answer


def worker_of(answer: Answer | Fail) -> str:
    assert isinstance(answer, Answer), answer
    return answer.placement.worker


def say(rig: Rig, worker: str, **load: object) -> None:
    given = {"slots": 4, "blocks_total": 100} | load
    rig.tell(Heartbeat(worker, "e1", State.READY, Load(**given), Rates(RATE)))  # type: ignore[arg-type]


def is_refused(answer: Answer | Fail) -> bool:
    return isinstance(answer, Fail) and answer.failed.code == "overloaded" and bool(answer.failed.retry_after_s)


def test_it_goes_where_nothing_better_is_to_be_done() -> None:
    rig = Rig("w1", "w2")
    say(rig, "w1", running=1, queued_prefill_tokens=int(RATE))
    say(rig, "w2", running=1)
    assert worker_of(ask(rig, "r1")) == "w2"
    say(rig, "w2", running=2, blocks_used=90)
    assert is_refused(ask(rig, "r2"))
    say(rig, "w2", running=4)
    assert is_refused(ask(rig, "r3"))
    assert isinstance(ask(rig, "r4", spare=False), Answer)  # the same without patience


def test_its_own_kind_is_nothing_better_until_slots_are_full() -> None:
    rig = Rig("w1")
    own = PriorityLoad(SPARE_PRIORITY, 3, 3, int(2 * RATE))
    say(rig, "w1", running=3, queued_prefill_tokens=int(2 * RATE), priorities=(own,))
    assert worker_of(ask(rig, "r1")) == "w1"
    assert is_refused(ask(rig, "r2"))  # booked: four of four slots


def test_what_vaults_have_of_waiting_prompts_is_fetched_by_the_first_worker() -> None:
    rig = Rig("w1")
    rig.join_vault("v1")
    shared = tokens(3, 64)
    rig.store("v1", shared, tier=Tier.VAULT)
    assert isinstance(ask(rig, "r0"), Answer)
    rig.core.handle(WorkerLeft("w1"), rig.now)
    heat, indexer, fleet = rig.core.decider.heat, rig.core.indexer, rig.core.fleet
    for number in range(3):  # of one beginning
        answer = ask(rig, f"r{number}", prompt_ids=(*shared, *tokens(10 + number, 64)))
        assert isinstance(answer, Fail)
        assert answer.failed.code == "no_workers"
    (kept,) = [prefix for prefix, _ in heat.hottest(rig.now)]
    assert len(kept.hashes) == 64 // kept.space.block_size
    rig.join("w2")
    asked = PreloadRequest("w2", MODEL, kept.space.model_revision, kept.space.block_size, 100)
    (chain,) = list(preload(asked, heat, fleet, indexer, 10**6, rig.now))[-1]
    assert (chain.hashes, chain.source) == (kept.hashes.tobytes(), "")
    heat.check_integrity()
