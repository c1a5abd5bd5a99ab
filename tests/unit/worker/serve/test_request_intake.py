"""What a worker refuses before anything runs, and what becomes of a request that it takes."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from kvfleet.worker.serve.request_intake import check_capacity, check_request, of_its_asker, sequences_of
from kvproto.errors import InvalidRequest, Overloaded, Unavailable
from kvproto.messages import Continuation, FinishReason, GenerateRequest, Load, PriorityLoad, Rates, Sampling
from kvproto.subjects import may_read, sealed_prefix


def check(
    request: GenerateRequest, *, taken: int = 0, limit: int = 10, load: Load = Load(), rates: Rates = Rates()
) -> int:
    return check_capacity(request, taken=taken, limit=limit, load=load, rates=rates)


ROOT = b"tenant root 16 b"
REQUEST = GenerateRequest("r", 2, "demo", Sampling(9), "_ing.x.b", prompt_ids=(1, 2), priority=3)


def test_capacity_is_counted_in_sequences() -> None:
    several = replace(REQUEST, sampling=Sampling(9, n=4))
    assert check(several, taken=6, limit=10) == check(REQUEST, taken=9, limit=10) == 0
    for request, taken in ((several, 7), (REQUEST, 10)):
        with pytest.raises(Unavailable) as error:
            check(request, taken=taken, limit=10)
        assert error.value.retryable
        assert error.value.retry_after_s == 1.0
    with pytest.raises(InvalidRequest) as refused:  # no worker of this size would ever take it
        check(several, taken=0, limit=3)
    assert refused.value.field == "n"


def test_a_deadline_that_the_queue_cannot_meet_is_refused_with_the_time_until_it_can() -> None:
    load = Load(waiting=4, queued_prefill_tokens=5000)
    for deadline_ms, late_s in ((1000, 4.0), (5001, None), (None, None)):
        asked = replace(REQUEST, attempt=0, priority=0, deadline_ms=deadline_ms)
        if late_s is None:
            check(asked, load=load, rates=Rates(1000.0))
            continue
        with pytest.raises(Overloaded) as refused:
            check(asked, load=load, rates=Rates(1000.0))
        assert refused.value.retry_after_s == late_s
        check(asked, load=load, rates=Rates())  # nothing measured yet
        check(replace(asked, priority=1), load=load, rates=Rates(1000.0))  # it is served first
        check(replace(asked, attempt=1), load=load, rates=Rates(1000.0))  # it goes on
    behind = replace(load, priorities=(PriorityLoad(1, 1, 0, 500), PriorityLoad(-5, 3, 3, 4500)))
    asked = replace(REQUEST, attempt=0, priority=0, deadline_ms=1000)
    check(asked, load=behind, rates=Rates(1000.0))
    with pytest.raises(Overloaded):
        check(replace(asked, priority=-5), load=behind, rates=Rates(1000.0))


def test_when_all_is_taken_lower_priorities_have_to_give_way() -> None:
    load = Load(
        waiting=4, priorities=(PriorityLoad(2, 5, 1, 10), PriorityLoad(0, 3, 2, 10), PriorityLoad(-1, 2, 1, 10))
    )
    assert check(replace(REQUEST, priority=1), taken=10, load=load) == 1
    several = replace(REQUEST, priority=1, sampling=Sampling(9, n=3))
    assert check(several, taken=10, load=load) == 3
    assert check(replace(several, priority=3), taken=11, load=load) == 4
    for priority, taken in ((1, 11), (0, 10), (-1, 10)):
        with pytest.raises(Overloaded):
            check(replace(several, priority=priority), taken=taken, load=load)
    assert check(replace(REQUEST, priority=1), taken=10, load=Load(waiting=1)) == 1  # all is of priority 0
    with pytest.raises(Overloaded):
        check(replace(REQUEST, priority=0), taken=10, load=Load(waiting=9))


@pytest.mark.parametrize(
    ("inbox", "may"),
    [
        ("_prd.public.x.b", True),
        ("_prd.public", True),
        ("_prd", False),
        ("_prd.publicity.x", False),
        ("_prd.other.public", False),
        ("_ing.x.b", True),
        ("_plc.p.r.r1.0", True),
    ],
)
def test_a_producer_reads_what_is_its_tenants(inbox: str, may: bool) -> None:
    assert may_read(inbox, "public") is may


def test_each_choice_goes_on_where_it_was() -> None:
    before = (Continuation((5, 6), 2), Continuation((7,), 1, FinishReason.STOP))
    several = replace(REQUEST, sampling=Sampling(9, n=3), continuations=before)
    specs = list(sequences_of(several, (0, 2), prompt_ids=(1, 2), root=ROOT, tenant="t", deadline=4.5))
    assert [(spec.choice, spec.output_ids, spec.text_sent) for spec in specs] == [(0, (5, 6), 2), (2, (), 0)]
    for spec in specs:
        assert (spec.request, spec.attempt, spec.prompt_ids, spec.root) == ("r", 2, (1, 2), ROOT)
        assert (spec.tenant, spec.priority, spec.deadline, spec.sampling.n) == ("t", 3, 4.5, 3)


def test_one_choice_goes_on_as_it_always_did() -> None:
    request = replace(REQUEST, output_ids=(5,), text_sent=1)
    (spec,) = sequences_of(request, (0,), prompt_ids=(1, 2), root=ROOT, tenant="t", deadline=None)
    assert (spec.choice, spec.output_ids, spec.text_sent) == (0, (5,), 1)


def test_every_choice_is_exact_if_the_request_is() -> None:
    several = replace(REQUEST, sampling=Sampling(9, n=2))
    for exact in (False, True):
        asked = replace(several, exact=exact)
        specs = list(sequences_of(asked, (0, 1), prompt_ids=(1, 2), root=ROOT, tenant="t", deadline=None))
        assert [spec.exact for spec in specs] == [exact, exact]


def test_only_an_ingress_or_a_placement_has_a_high_priority() -> None:
    """A producer may publish to workers; no inbox that it can name has it taken for one of these."""
    sealed = sealed_prefix("_ing", "i1", b"key")
    for reply, key, believed in (
        (f"{sealed}.r.r.2", b"key", True),
        (f"{sealed_prefix('_plc', 'p1', b'key')}.r.r.2", b"key", True),
        ("_ing.i1.r.r.2", b"", True),  # no key: nothing proves anything
        ("_ing.i1.r.r.2", b"key", False),
        ("_prd.public.x.r.r.2", b"key", False),
        ("_prd.public.x.r.r.2", b"", False),
        (f"{sealed}.r.r.2", b"another", False),
        ("", b"", False),
    ):
        assert of_its_asker(REQUEST, reply, key, 0).priority == (3 if believed else 0), (reply, key)
        assert of_its_asker(REQUEST, reply, key, 2).priority == (3 if believed else 2)
        assert of_its_asker(replace(REQUEST, priority=-9), reply, key, 0).priority == -9
    assert replace(of_its_asker(REQUEST, "", b"", 0), priority=3) == REQUEST


def test_frames_go_to_no_inbox_where_answers_are_read() -> None:
    for inbox, fine in (
        ("_ing.x.b", True),
        ("_prd.public.x", True),
        ("_INBOX.x", True),
        ("_plc.p1.r.victim.0", False),
        ("_wrk.w1.l.3", False),
        ("_vlt.v1.x", False),
        ("kvf.events.w1", False),
    ):
        asked = replace(REQUEST, inbox=inbox)
        with contextlib.nullcontext() if fine else pytest.raises(InvalidRequest, match="inbox"):
            check_request(asked, draining=False, unix_ms=0.0)
