"""A bare producer's request: offered, retried, accepted, watched, and ended exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_build import INBOX, MODEL, PREFIX, a_beat, a_core, a_generate, a_record, accepted, failed, finished

from kvfleet.placement.core import SILENCE_LIMIT_S, PlacementCore
from kvfleet.placement.events import (
    Action,
    AskStillRunning,
    Cancel,
    DropMember,
    Fail,
    Forward,
    NobodyListens,
    PingUnanswered,
    PingWorker,
    Tick,
    WorkerAnswered,
    WorkerDisconnected,
    WorkerLeft,
    WorkerRegistered,
)
from kvfleet.placement.producers.forwarding import LAST_CHANCE_S, TOKENISE_S
from kvfleet.placement.producers.in_flight import (
    ACKNOWLEDGE_S,
    ASK_AGAIN_S,
    ASKS_LIMIT,
    LOST_GRACE_S,
    MOST_S,
    ORPHANS_KEPT_S,
    SILENT_GRACE_S,
    OfferTimeout,
)
from kvfleet.placement.workers.fleet import PING_AGAIN_S, SILENT_AFTER_S
from kvproto.chats import chat_of
from kvproto.ids import model_token
from kvproto.messages import Encoding, Milestone, Milestones, Overflow, Passed, Progress, State, Tokens

REPLY = f"{PREFIX}.r.r1"


A_LITTLE = 0.0005  # what a short text adds to the timeout


def the_forward(actions: list[Action]) -> Forward:
    (forward,) = [a for a in actions if isinstance(a, Forward)]
    return forward


def failures(actions: list[Action]) -> list[Fail]:
    return [a for a in actions if isinstance(a, Fail)]


def test_a_chat_is_offered_where_its_conversation_is() -> None:
    """Placement cannot render it: the chat's own key says where its blocks are, unless the producer names a session."""
    turns = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]
    found = set()
    for count in (1, 2):
        core, chat = a_core("w1", "w2", "w3"), chat_of(turns[:count], unix_s=7)
        event = replace(a_generate(prompt=None), chat=chat, request=f"r{count}")
        forward = the_forward(core.handle(event, 1.0))
        assert (forward.request.chat, forward.request.prompt, forward.request.prompt_ids) == (chat, None, ())
        assert forward.request.session == chat.conversation
        found.add(forward.worker)
    assert len(found) == 1
    event = replace(event, request="r3", ask=replace(event.ask, session="mine"))
    assert the_forward(core.handle(event, 1.0)).request.session == "mine"


def offer(core: PlacementCore, now: float = 1.0, **fields: object) -> Forward:
    return the_forward(core.handle(a_generate(**fields), now))  # type: ignore[arg-type]


def offered_and_accepted(core: PlacementCore, now: float = 1.0) -> Forward:
    forward = offer(core, now)
    assert core.handle(WorkerAnswered(accepted("r1", 0, forward.worker)), now + 0.01) == []
    return forward


def is_over(core: PlacementCore) -> bool:
    core.check_integrity()
    return len(core.in_flight) == 0 and len(core.bookings) == 0


class TestOffer:
    def test_carries_the_request_the_inbox_and_the_watcher(self) -> None:
        core = a_core("w1")
        forward = offer(
            core, tenant="acme", encoding=Encoding.JSON, prompt="hi", max_tokens=9, stop=("x",), deadline_ms=500
        )
        request = forward.request
        assert (forward.worker, forward.tenant, forward.reply) == ("w1", "acme", f"{REPLY}.0")
        assert (request.inbox, request.encoding, request.watcher, request.model) == (INBOX, Encoding.JSON, "p1", MODEL)
        assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.stop) == (9, 7, ("x",))
        assert (request.deadline_ms, request.expires_unix_ms) == (500, 1_000_500)
        assert core.stats().booked == 1

    def test_carries_all_that_was_asked_of_sampling(self) -> None:
        asked = {
            "temperature": 0.5, "top_p": 0.5, "top_k": 5, "ignore_eos": True, "n": 3, "min_p": 0.1,
            "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5, "logit_bias": {5: -1.0},
            "logprobs": 2, "min_tokens": 4,
        }  # fmt: skip
        sampling = offer(a_core("w1"), **asked, context_overflow=Overflow.SLIDING).request.sampling
        assert {name: getattr(sampling, name) for name in asked} == asked
        assert sampling.overflow is Overflow.SLIDING

    def test_carries_whether_the_result_must_be_exact(self) -> None:
        assert not offer(a_core("w1")).request.exact
        assert offer(a_core("w1"), exact=True).request.exact

    @pytest.mark.parametrize(
        ("ceiling", "asked", "given"), [(0, 100, 0), (0, -5, -5), (7, 100, 7), (7, 3, 3), (-9, 0, -9)]
    )
    def test_a_producers_priority_has_a_ceiling(self, ceiling: int, asked: int, given: int) -> None:
        core = a_core("w1", max_producer_priority=ceiling)
        assert offer(core, priority=asked).request.priority == given

    def test_the_models_real_name_is_found_by_its_token(self) -> None:
        core = a_core()
        core.handle(WorkerRegistered(a_record("w1", model="org/model")), 0.0)
        assert offer(core, token=model_token("org/model")).request.model == "org/model"

    def test_an_unknown_model_fails_at_once(self) -> None:
        core = a_core("w1")
        (fail,) = core.handle(a_generate(token="nope", encoding=Encoding.JSON), 1.0)
        assert isinstance(fail, Fail)
        assert (fail.failed.code, fail.failed.field, fail.inbox, fail.encoding) == (
            "model_not_found",
            "model",
            INBOX,
            Encoding.JSON,
        )
        assert is_over(core)

    def test_more_than_the_limit_is_refused_as_retryable(self) -> None:
        core = a_core("w1", limit=2)
        for i in range(2):
            offer(core, request=f"r{i}")
        (fail,) = failures(core.handle(a_generate("r9"), 1.0))
        assert fail.failed.retryable


class TestNextWorker:
    def test_after_50_ms_of_silence(self) -> None:
        core = a_core("w1", "w2")
        first = offer(core)
        assert core.in_flight.due() == pytest.approx(1.0 + ACKNOWLEDGE_S, abs=A_LITTLE)
        assert core.handle(Tick(), 1.0 + ACKNOWLEDGE_S - 0.001) == []
        actions = core.handle(Tick(), 1.0 + ACKNOWLEDGE_S + A_LITTLE)
        second = the_forward(actions)
        (leave,) = [a for a in actions if isinstance(a, Cancel)]  # should it wake, nothing must come of it
        assert (leave.worker, leave.cancel.attempt, leave.cancel.inbox) == (first.worker, 0, INBOX)
        assert {first.worker, second.worker} == {"w1", "w2"}
        assert (second.request.attempt, second.reply) == (1, f"{REPLY}.1")
        assert second.request.sampling == first.request.sampling  # the seed too: the same tokens
        assert core.bookings.requests_at(first.worker) == 0
        assert core.forwarding.retried_offers_total == 1

    def test_but_not_after_silence_that_says_nothing(self) -> None:
        core = a_core("w1", "w2")
        first = offer(core)
        for now in (1.1, 1.3, 2.0):
            assert not any(isinstance(one, Forward | Cancel) for one in core.handle(Tick(disconnected=True), now))
            wake_at = core.in_flight.due()
            assert wake_at is not None
            assert wake_at > now, "nobody spins"
        core.handle(WorkerAnswered(accepted("r1", 0, first.worker)), 2.05)
        assert not any(isinstance(one, Forward | Cancel) for one in core.handle(Tick(), 2.2))
        assert (core.forwarding.retried_offers_total, core.forwarding.forwarded_total) == (0, 1)
        core.check_integrity()

    def test_and_after_silence_that_goes_on_when_it_says_something(self) -> None:
        core = a_core("w1", "w2")
        first = offer(core)
        core.handle(Tick(disconnected=True), 1.2)
        again = the_forward(core.handle(Tick(), 1.4))
        assert (again.worker, again.reply) == (first.worker, first.reply), "it, or its answer, may have been lost"
        assert again.request == replace(first.request, again=True)
        assert core.forwarding.retried_offers_total == 0
        second = the_forward(core.handle(Tick(), 1.6))
        assert (second.worker != first.worker, second.request.attempt, second.request.again) == (True, 1, False)

    def test_nor_is_it_offered_again_past_its_deadline(self) -> None:
        core = a_core("w1", "w2")
        offer(core, deadline_ms=300)
        core.handle(Tick(disconnected=True), 1.2)
        (fail,) = failures(core.handle(Tick(), 1.4))
        assert fail.failed.code == "deadline_exceeded"

    def test_a_long_text_may_be_tokenised_first(self) -> None:
        core = a_core("w1", "w2")
        offer(core, request="long", prompt="x" * 500_000)
        offer(core, request="short")
        leave, retried = core.handle(Tick(), 1.06)
        assert isinstance(leave, Cancel)
        assert isinstance(retried, Forward)
        assert retried.request.request == "short"
        core.check_integrity()
        core.handle(WorkerAnswered(accepted("short", 1, retried.worker)), 1.07)
        for worker in ("w1", "w2"):
            core.handle(a_beat(worker), 1.5)
        assert core.handle(Tick(), 1.04 + 500_000 * TOKENISE_S) == []
        assert the_forward(core.handle(Tick(), 1.06 + 500_000 * TOKENISE_S)).request.request == "long"

    def test_at_once_if_nobody_listens_there_and_a_ping_follows(self) -> None:
        core = a_core("w1", "w2")
        first = offer(core)
        actions = core.handle(NobodyListens("r1", 0), 1.001)
        assert the_forward(actions).worker != first.worker
        assert PingWorker(first.worker) in actions
        assert core.handle(NobodyListens("r1", 0), 1.002) == []  # an old attempt's

    def test_at_once_if_the_worker_leaves(self) -> None:
        core = a_core("w1", "w2")
        first = offer(core)
        assert the_forward(core.handle(WorkerLeft(first.worker), 1.001)).worker != first.worker

    def test_after_a_retryable_refusal(self) -> None:
        core = a_core("w1", "w2")
        first = offer(core)
        actions = core.handle(WorkerAnswered(failed("r1", 0, "draining", retryable=True)), 1.01)
        assert the_forward(actions).worker != first.worker

    def test_where_a_clock_is_wrong_without_the_date(self) -> None:
        core = a_core("w1")
        first = offer(core, deadline_ms=60_000)
        late = replace(failed("r1", 0, "unavailable", retryable=True), field="expires_unix_ms")
        again = the_forward(core.handle(WorkerAnswered(late), 1.01))
        assert (again.worker, first.request.expires_unix_ms, again.request.expires_unix_ms) == ("w1", 1_060_000, None)
        assert again.request.deadline_ms == 59_990

    @pytest.mark.parametrize("why", ["silence", "503", "refusal"])
    def test_each_ready_worker_once_then_the_producer_hears(self, why: str) -> None:
        core, now, tried = a_core("w1", "w2", "w3"), 1.0, []
        actions = core.handle(a_generate(), now)
        while forwards := [a for a in actions if isinstance(a, Forward)]:
            tried.append(forwards[0].worker)
            attempt = forwards[0].request.attempt
            now += ACKNOWLEDGE_S + A_LITTLE
            actions = core.handle(
                {
                    "silence": Tick(),
                    "503": NobodyListens("r1", attempt),
                    "refusal": WorkerAnswered(failed("r1", attempt, "out_of_memory", retryable=True)),
                }[why],
                now,
            )
            if why == "silence" and len(tried) == 3:  # there is nobody else: it may only be slow
                assert actions == []
                assert core.in_flight.due() == pytest.approx(now + LAST_CHANCE_S - ACKNOWLEDGE_S, abs=2 * A_LITTLE)
                now += LAST_CHANCE_S
                actions = core.handle(Tick(), now)
        assert sorted(tried) == ["w1", "w2", "w3"]
        (fail,) = failures(actions)
        said = fail.failed.code, fail.failed.retryable, fail.failed.attempt
        assert said == ("no_workers", True, 3), "frames of the three that were slow are of an older attempt"
        assert is_over(core)
        assert core.forwarding.producer_failures_total == 1

    def test_a_refusal_that_no_worker_would_lift_is_passed_on(self) -> None:
        core = a_core("w1", "w2")
        offer(core, encoding=Encoding.JSON)
        refusal = failed("r1", 0, "context_length_exceeded", retryable=False)
        assert core.handle(WorkerAnswered(refusal), 1.01) == [Fail(INBOX, refusal, Encoding.JSON)]
        assert is_over(core)

    def test_not_past_the_deadline(self) -> None:
        core = a_core("w1", "w2")
        offer(core, deadline_ms=40)
        (fail,) = failures(core.handle(Tick(), 1.06))
        assert fail.failed.code == "deadline_exceeded"
        assert is_over(core)


class TestAcceptance:
    def test_a_late_one_is_cancelled_whatever_happened_since(self) -> None:
        core = a_core("w1", "w2")
        first = offer(core)
        second = the_forward(core.handle(Tick(), 1.051))
        (cancel,) = core.handle(WorkerAnswered(accepted("r1", 0, first.worker)), 1.06)
        assert isinstance(cancel, Cancel)
        assert (cancel.worker, cancel.cancel.request, cancel.cancel.attempt) == (first.worker, "r1", 0)
        core.handle(WorkerAnswered(accepted("r1", 1, second.worker)), 1.07)
        core.handle(WorkerAnswered(finished("r1", 1)), 1.2)
        assert is_over(core)
        assert isinstance(core.handle(WorkerAnswered(accepted("r1", 0, first.worker)), 9.0)[0], Cancel)
        assert core.forwarding.late_acceptances_total == 2

    def test_said_twice_means_the_same(self) -> None:
        core = a_core("w1")
        forward = offered_and_accepted(core)
        assert core.handle(WorkerAnswered(accepted("r1", 0, forward.worker)), 1.02) == []
        assert core.forwarding.forwarded_total == 1

    @pytest.mark.parametrize("new", ["e2", "e0"])
    def test_of_a_life_that_is_over_is_a_loss(self, new: str) -> None:
        """Whatever the clocks of their hosts said."""
        core = a_core("w1")
        offer(core)
        core.handle(WorkerRegistered(a_record("w1", epoch=new)), 1.01)
        core.handle(WorkerAnswered(accepted("r1", 0, "w1", "e1")), 1.02)
        (fail,) = failures(core.handle(Tick(), 1.02 + LOST_GRACE_S))
        assert fail.failed.code == "worker_lost"

    @pytest.mark.parametrize("new", ["e2", "e0"])
    def test_of_a_life_that_is_not_known_yet_is_none(self, new: str) -> None:
        core = a_core("w1")
        offer(core)
        core.handle(WorkerAnswered(accepted("r1", 0, "w1", new)), 1.02)
        core.handle(WorkerRegistered(a_record("w1", epoch=new)), 1.3)
        assert failures(core.handle(Tick(), 1.02 + 2 * LOST_GRACE_S)) == []
        assert len(core.in_flight) == 1

    def test_frames_of_the_stream_itself_change_nothing(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        assert core.handle(WorkerAnswered(Tokens("r1", 0, 0, 0, (1,), ("a",))), 1.1) == []
        assert len(core.in_flight) == 1


class TestEnd:
    @pytest.mark.parametrize(
        "notice", [finished("r1", 0), failed("r1", 0, "engine_failure", retryable=True)], ids=["finished", "failed"]
    )
    def test_the_workers_terminal_frame_is_the_only_one(self, notice: object) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        assert core.handle(WorkerAnswered(notice), 1.5) == []  # type: ignore[arg-type]
        assert is_over(core)
        assert failures(core.handle(WorkerLeft("w1"), 1.6)) == []
        assert core.handle(Tick(), 9.0) == []

    def test_a_notice_of_another_attempt_is_not_the_end(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        core.handle(WorkerAnswered(finished("r1", 3)), 1.5)
        assert len(core.in_flight) == 1

    def test_without_an_acknowledgement_the_end_is_still_the_end(self) -> None:
        core = a_core("w1")
        offer(core)
        assert core.handle(WorkerAnswered(finished("r1", 0)), 1.01) == []
        assert is_over(core)


class TestCancelled:
    """Of a cancel that placement did not send, a worker tells nobody but placement."""

    CANCELLED = failed("r1", 0, "cancelled", retryable=False)

    def milestone(self, attempt: int = 0) -> Milestones:
        ended = Milestone("public", "r1", attempt, Passed.ENDED, output_tokens=4, code="cancelled")
        return Milestones("w1", "e1", (ended,))

    @pytest.mark.parametrize("first", ["notice", "milestone"])
    def test_the_producer_hears_of_it_once(self, first: str) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        events = [WorkerAnswered(self.CANCELLED), self.milestone()]
        actions: list[Action] = []
        for event in events if first == "notice" else events[::-1]:
            actions += core.handle(event, 2.0)
        (fail,) = failures(actions)
        assert (fail.inbox, fail.encoding, fail.failed.code, fail.failed.attempt, fail.failed.retryable) == (
            INBOX, Encoding.MSGPACK, "cancelled", 0, False,
        )  # fmt: skip
        assert core.forwarding.producer_failures_total == 1
        assert is_over(core)
        assert failures(core.handle(WorkerLeft("w1"), 2.1) + core.handle(Tick(), 9.0)) == []

    def test_within_the_grace_too(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        core.handle(WorkerLeft("w1"), 2.0)
        assert [f.failed.code for f in failures(core.handle(WorkerAnswered(self.CANCELLED), 2.01))] == ["cancelled"]
        assert is_over(core)

    def test_an_attempt_that_was_taken_back_tells_nobody(self) -> None:
        core = a_core("w1", "w2", policy="round_robin")
        first = offer(core)
        second = the_forward(core.handle(Tick(), 1.06))
        core.handle(WorkerAnswered(accepted("r1", 1, second.worker)), 1.07)
        assert core.handle(WorkerAnswered(self.CANCELLED), 1.08) == []
        assert core.handle(self.milestone(), 1.09) == []
        assert first.worker != second.worker
        assert len(core.in_flight) == 1

    @pytest.mark.parametrize("who", ["an older worker", "a reader of batches"])
    def test_nor_anybody_whom_the_worker_tells(self, who: str) -> None:
        core = a_core()
        core.handle(WorkerRegistered(replace(a_record("w1"), attaches=who != "an older worker")), 0.0)
        encoding = Encoding.FRAMES if who == "a reader of batches" else Encoding.JSON
        core.handle(a_generate(encoding=encoding), 1.0)
        core.handle(WorkerAnswered(accepted("r1", 0, "w1")), 1.01)
        assert core.handle(WorkerAnswered(self.CANCELLED), 2.0) == []
        assert is_over(core)


class TestLoss:
    @pytest.mark.parametrize(
        "event",
        [WorkerLeft("w1"), WorkerRegistered(a_record("w1", epoch="e2")), PingUnanswered("w1", True)],
        ids=["left", "restarted", "unanswered"],
    )
    def test_the_producer_hears_once_after_the_grace(self, event: object) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        core.handle(event, 2.0)  # type: ignore[arg-type]
        assert core.in_flight.due() == pytest.approx(2.0 + LOST_GRACE_S)
        actions = core.handle(Tick(), 2.0 + LOST_GRACE_S)
        (fail,) = failures(actions)
        assert (fail.inbox, fail.failed.code, fail.failed.retryable) == (INBOX, "worker_lost", True)
        assert [type(a) for a in actions if isinstance(a, (Cancel, Fail))] == [Cancel, Fail]  # nothing after its end
        assert is_over(core)
        assert failures(core.handle(Tick(), 3.0)) == []
        assert core.handle(WorkerAnswered(finished("r1", 0)), 3.0) == []

    def test_a_notice_within_the_grace_counts(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        core.handle(WorkerLeft("w1"), 2.0)
        core.handle(WorkerAnswered(finished("r1", 0)), 2.05)
        assert is_over(core)
        assert core.handle(Tick(), 2.2) == []

    def test_back_within_the_grace_in_the_same_life(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        core.handle(WorkerLeft("w1"), 2.0)
        core.handle(WorkerRegistered(a_record("w1")), 2.4)  # its connection was cut, and it came back
        assert core.handle(Tick(), 3.0) == []
        assert len(core.in_flight) == 1

    def test_heartbeats_say_that_it_is_back_before_its_record_does(self) -> None:
        core = a_core("w1")
        core.handle(a_beat("w1"), 1.0)
        offered_and_accepted(core)
        core.handle(PingUnanswered("w1", True), 2.0)
        core.handle(WorkerLeft("w1"), 2.05)
        for tenth in range(1, 30):
            now = 2.0 + tenth / 10
            if tenth in (4, 9, 14):
                core.handle(a_beat("w1"), now)
            if tenth == 16:
                core.handle(WorkerRegistered(a_record("w1")), now)
            assert core.handle(Tick(), now) == []
        assert len(core.in_flight) == 1
        core.check_integrity()

    def test_heartbeats_that_cease_again_were_the_last(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        core.handle(WorkerLeft("w1"), 2.0)
        core.handle(a_beat("w1"), 2.3)
        core.handle(a_beat("w1", epoch="e2"), 2.8)  # another life's
        assert core.handle(Tick(), 2.29 + LOST_GRACE_S) == []
        assert len(failures(core.handle(Tick(), 2.31 + LOST_GRACE_S))) == 1

    def test_a_heartbeat_is_enough_for_who_was_only_suspected(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        core.handle(PingUnanswered("w1", True), 2.0)
        core.handle(a_beat("w1"), 2.3)
        assert core.handle(Tick(), 3.0) == []
        assert len(core.in_flight) == 1

    def test_after_a_long_silence_there_is_little_grace(self) -> None:
        """Four seconds after a loss the producer knows, however it was noticed."""
        core = a_core("w1", "w2", policy="round_robin")
        offered_and_accepted(core)  # by one of them
        core.handle(a_generate("r2"), 1.0)
        core.handle(WorkerAnswered(accepted("r2", 0, "w2")), 1.01)
        core.handle(a_beat("w2"), 3.0)
        core.handle(WorkerLeft("w2"), 3.4)
        core.handle(PingUnanswered("w1", False), 3.5)
        assert core.in_flight.due() == pytest.approx(3.5 + SILENT_GRACE_S)
        core.check_integrity()
        (fail,) = failures(core.handle(Tick(), 3.5 + SILENT_GRACE_S))
        assert fail.failed.request == "r1"

    def test_a_hung_worker_that_wakes_is_told_what_to_cancel(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        core.handle(WorkerLeft("w1"), 2.0)
        core.handle(Tick(), 2.1 + LOST_GRACE_S)
        (cancel,) = core.handle(WorkerRegistered(a_record("w1")), 10.0)
        assert isinstance(cancel, Cancel)
        assert cancel.cancel.request == "r1"
        assert core.handle(WorkerRegistered(a_record("w1")), 11.0) == []

    def test_what_to_cancel_is_forgotten_with_time(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        core.handle(WorkerLeft("w1"), 2.0)
        core.handle(Tick(), 2.1 + LOST_GRACE_S)
        core.handle(Tick(), 2.3 + LOST_GRACE_S + ORPHANS_KEPT_S)
        assert core.handle(WorkerRegistered(a_record("w1")), 70.0) == []


class TestSuspicion:
    def test_a_broken_connection_is_checked_by_a_ping_and_a_503_drops_the_member(self) -> None:
        core = a_core("w1")
        assert core.handle(WorkerDisconnected("w1"), 1.0) == [PingWorker("w1")]
        assert core.handle(WorkerDisconnected("w9"), 1.0) == []
        assert core.handle(PingUnanswered("w1", True), 1.05) == [DropMember("w1")]
        assert core.handle(PingUnanswered("w9", True), 1.05) == []

    def test_silence_drops_it_only_if_nothing_else_was_heard_for_long(self) -> None:
        core = a_core("w1")
        core.handle(a_beat("w1"), 1.0)
        assert core.handle(PingUnanswered("w1", False), 1.0 + SILENCE_LIMIT_S - 0.1) == []
        assert core.handle(PingUnanswered("w1", False), 1.0 + SILENCE_LIMIT_S) == [DropMember("w1")]

    def test_a_worker_that_falls_silent_is_asked(self) -> None:
        core = a_core("w1", "w2")
        core.handle(a_beat("w2"), 1.0)
        assert core.handle(Tick(), SILENT_AFTER_S) == []
        assert core.handle(Tick(), SILENT_AFTER_S + 0.1) == [PingWorker("w1")]
        assert core.handle(Tick(), SILENT_AFTER_S + 0.2) == []  # not ten times a second
        assert core.handle(Tick(), SILENT_AFTER_S + 0.1 + PING_AGAIN_S) == [PingWorker("w1")]
        core.handle(WorkerRegistered(a_record("w1")), SILENT_AFTER_S + 0.7)
        assert core.handle(Tick(), SILENT_AFTER_S + 1.0) == []


class TestLostNotices:
    def beats_until(self, core: PlacementCore, begin: float, end: float) -> list[Action]:
        actions, now = [], begin
        while now < end:
            core.handle(a_beat("w1"), now)
            actions += core.handle(Tick(), now)
            now += 0.5
        return actions

    def test_a_long_silence_about_a_request_is_asked_about(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        (ask,) = self.beats_until(core, 1.5, 2.5 + ASK_AGAIN_S)
        assert isinstance(ask, AskStillRunning)
        assert (ask.question.request, ask.question.inbox) == ("r1", f"{REPLY}.0")
        core.handle(WorkerAnswered(Progress("r1", 0, 17)), 2.5 + ASK_AGAIN_S)
        assert len(core.in_flight) == 1

    def test_a_worker_that_forgot_it_ends_it(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        self.beats_until(core, 1.5, 2.5 + ASK_AGAIN_S)
        forgot = failed("r1", 0, "worker_lost", retryable=True)
        assert len(failures(core.handle(WorkerAnswered(forgot), 2.6 + ASK_AGAIN_S))) == 1
        assert is_over(core)

    def test_a_worker_that_answers_no_question_is_left_alone_in_the_end(self) -> None:
        core = a_core("w1")
        offered_and_accepted(core)
        actions = self.beats_until(core, 1.5, 5 + (ASKS_LIMIT + 1) * ASK_AGAIN_S)
        assert [type(a) for a in actions] == [AskStillRunning] * ASKS_LIMIT
        assert is_over(core)
        assert core.in_flight.abandoned_total == 1


def test_a_draining_worker_finishes_what_it_accepted() -> None:
    core = a_core("w1")
    offered_and_accepted(core)
    core.handle(a_beat("w1", state=State.DRAINING), 1.2)
    assert len(core.in_flight) == 1
    (fail,) = failures(core.handle(a_generate("r2"), 1.3))
    assert fail.failed.code == "no_workers"


class TestOfferTimeout:
    def test_grows_while_workers_answer_late_and_shrinks_again(self) -> None:
        timeout = OfferTimeout()
        assert timeout.seconds == ACKNOWLEDGE_S
        for _ in range(20):
            timeout.was_late()
        assert timeout.seconds == MOST_S
        for _ in range(100):
            timeout.answered(0.002)
        assert timeout.seconds == ACKNOWLEDGE_S
        for _ in range(100):
            timeout.answered(0.1)  # within it: nobody was passed over
        assert timeout.seconds == pytest.approx(0.4, rel=0.01)

    def test_one_who_was_late_is_given_more_time_with_the_next_request(self) -> None:
        core = a_core("w1", "w2")
        first = offer(core)
        core.handle(Tick(), 1.051)
        core.handle(WorkerAnswered(accepted("r1", 0, first.worker)), 1.06)
        core.handle(a_generate("r2"), 2.0)
        assert [a for a in core.handle(Tick(), 2.06) if isinstance(a, Forward)] == []
        assert [a for a in core.handle(Tick(), 2.11) if isinstance(a, Forward)]
