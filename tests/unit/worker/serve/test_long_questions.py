"""Ids that come in several messages: put together again, and never more of them kept than there is room for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.serve import admin
from kvfleet.worker.serve.admin import KEEP_S, MAX_KEPT, LongAdminQuestions
from kvproto.errors import InvalidRequest, PayloadTooLarge
from kvproto.messages import AdminCommand, AdminRequest

ASK = AdminRequest(AdminCommand.INSPECT, "t")


def told(ids: tuple[int, ...], before: int, question: str = "q") -> AdminRequest:
    return replace(ASK, ids=ids, question=question, ids_before=before, more_ids=True)


def asked(before: int, question: str = "q", part: int = 0) -> AdminRequest:
    return replace(ASK, question=question, ids_before=before, part=part)


def test_a_short_question_brings_its_ids() -> None:
    questions = LongAdminQuestions()
    assert questions.ids_of(replace(ASK, ids=(1, 2)), 0.0) == (1, 2)
    assert questions.ids_of(ASK, 0.0) == ()
    assert len(questions._kept) == 0


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple), min_size=1, max_size=6))
def test_what_came_in_pieces_is_the_whole(pieces: list[tuple[int, ...]]) -> None:
    questions, ids = LongAdminQuestions(), ()
    for piece in pieces:
        assert questions.ids_of(told(piece, len(ids)), 0.0) is None
        assert questions.ids_of(told((9,), 0, "another"), 0.0) is None  # in between
        questions = _without(questions, "another")
        ids += piece
    for part in range(3):
        assert questions.ids_of(asked(len(ids), part=part), 0.0) == ids


def _without(questions: LongAdminQuestions, name: str) -> LongAdminQuestions:
    del questions._kept[name]
    return questions


@pytest.mark.parametrize("before", [0, 1, 3, 2**40])
def test_pieces_that_do_not_follow_are_refused(before: int) -> None:
    questions = LongAdminQuestions()
    assert questions.ids_of(told((1, 2), 0), 0.0) is None
    for wrong in (told((3,), before), asked(before)):
        with pytest.raises(InvalidRequest) as error:
            questions.ids_of(wrong, 0.0)
        assert error.value.field == "ids_before"
        assert len(questions._kept) == 0, "half a question is of no use any more"
        assert questions.ids_of(told((1, 2), 0), 0.0) is None


def test_it_keeps_few_questions_for_a_while() -> None:
    questions = LongAdminQuestions()
    for n in range(MAX_KEPT + 1):
        questions.ids_of(told((n,), 0, f"q{n}"), 0.0)
    assert len(questions._kept) == MAX_KEPT
    with pytest.raises(InvalidRequest):
        questions.ids_of(asked(1, "q0"), 0.0)
    assert questions.ids_of(asked(1, "q8"), KEEP_S - 0.1) == (8,)
    assert questions.ids_of(asked(1, "q8"), KEEP_S + 1) == (8,)  # somebody goes on with it
    assert len(questions._kept) == 1
    with pytest.raises(InvalidRequest):
        questions.ids_of(asked(1, "q7"), KEEP_S + 1)


def test_no_question_is_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_IDS", 5)
    questions = LongAdminQuestions()
    questions.ids_of(told((1, 2, 3), 0), 0.0)
    with pytest.raises(PayloadTooLarge) as error:
        questions.ids_of(told((4, 5, 6), 3), 0.0)
    assert error.value.field == "ids"
    assert len(questions._kept) == 0
