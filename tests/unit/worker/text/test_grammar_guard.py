"""Grammars are tried in a process that has limits, in turn by tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.text import grammar_guard
from kvfleet.worker.text.grammar_guard import GrammarGuard
from kvproto.errors import InvalidRequest
from kvproto.messages import Grammar, GrammarForm
from kvsampling.grammar import Grammars

WELL = Grammar(GrammarForm.REGEX, "a+")


@pytest.fixture
def guard() -> Iterator[GrammarGuard]:
    text = (DEMO_FOLDER / "tokenizer.json").read_text()
    made = GrammarGuard(Grammars(lambda: text, 1024, [2]))
    yield made
    made.stop()


def exploding(number: int) -> Grammar:
    return Grammar(GrammarForm.JSON_SCHEMA, f'{{"type": "integer", "multipleOf": {1234567 + number}}}')


async def test_what_explodes_ends_its_process_alone(guard: GrammarGuard) -> None:
    await guard.check(WELL, "t")
    first = guard._process
    with pytest.raises(InvalidRequest, match="takes more than"):
        await guard.check(exploding(0), "t")
    assert guard._process is None
    await guard.check(Grammar(GrammarForm.REGEX, "b+"), "t")
    assert guard._process is not None
    assert guard._process is not first


async def test_answers_are_kept(guard: GrammarGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest):
        await guard.check(exploding(0), "t")
    await guard.check(WELL, "t")
    monkeypatch.setattr(guard, "_try", None)
    await guard.check(WELL, "another")
    with pytest.raises(InvalidRequest, match="takes more than"):
        await guard.check(exploding(0), "another")


async def test_another_tenant_waits_for_one_at_most(guard: GrammarGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(guard, "_try", lambda grammar: tried.append(grammar.text) or "")
    many = [asyncio.create_task(guard.check(Grammar(GrammarForm.REGEX, f"a{at}"), "one")) for at in range(20)]
    await asyncio.sleep(0)
    await guard.check(WELL, "another")
    assert tried.index(WELL.text) <= 2
    await asyncio.gather(*many)
    assert len(tried) == 21


async def test_few_answers_are_kept(guard: GrammarGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_guard, "KEPT", 3)
    monkeypatch.setattr(guard, "_try", lambda grammar: "")
    for number in range(10):
        await guard.check(Grammar(GrammarForm.REGEX, f"a{number}"), "t")
    assert len(guard._faults) == 3
