"""What a worker refuses before anything runs, and what becomes of a request that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvproto.errors import InvalidRequest, Unavailable
from kvproto.messages import Continuation, FinishReason, GenerateRequest, Sampling
from services.worker.request_intake import check_capacity, sequences_of

ROOT = b"tenant root 16 b"
REQUEST = GenerateRequest("r", 2, "demo", Sampling(9), "_ing.x.b", prompt_ids=(1, 2), priority=3)


def test_capacity_is_counted_in_sequences() -> None:
    several = replace(REQUEST, sampling=Sampling(9, n=4))
    check_capacity(several, taken=6, limit=10)
    check_capacity(REQUEST, taken=9, limit=10)
    for request, taken in ((several, 7), (REQUEST, 10)):
        with pytest.raises(Unavailable) as error:
            check_capacity(request, taken=taken, limit=10)
        assert error.value.retryable
    with pytest.raises(InvalidRequest) as refused:  # no worker of this size would ever take it
        check_capacity(several, taken=0, limit=3)
    assert refused.value.field == "n"


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
