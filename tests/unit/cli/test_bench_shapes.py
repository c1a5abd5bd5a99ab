"""What each shape asks: the same of the same seed, and shared text where the shape says so."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from kvfleet.cli.bench.shapes import SIZES, BenchPlan, BenchSession, LoadLimits, Shape, ShapeSizes
from kvservice.trace_rows import parse_rows


def asked(shape: Shape, count: int = 40, words_per_token: float = 1.0, **sizes: float) -> list[BenchSession]:
    plan = BenchPlan(shape, replace(SIZES[shape], **sizes), seed=3, text_seed=3)  # type: ignore[arg-type]
    return list(islice(plan.sessions(words_per_token), count))


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("shape", [Shape.CHAT, Shape.RAG, Shape.AGENT, Shape.ONESHOT])
def test_a_seed_asks_the_same_again_and_another_seed_something_else(shape: Shape) -> None:
    plan = BenchPlan(shape, SIZES[shape], seed=3, text_seed=3)
    first, again = (list(islice(plan.sessions(0.8), 20)) for _ in range(2))
    assert first == again
    assert list(islice(replace(plan, seed=4).sessions(0.8), 20)) != first


def test_another_text_seed_asks_other_words_of_the_same_lengths() -> None:
    plan = BenchPlan(Shape.CHAT, SIZES[Shape.CHAT], seed=3, text_seed=3)
    ours, others = (list(islice(one.sessions(1.0), 20)) for one in (plan, replace(plan, text_seed=9)))
    for one, other in zip(ours, others, strict=True):
        assert one.system != other.system
        for turn, same in zip(one.turns, other.turns, strict=True):
            assert (turn.output_tokens, turn.pause_s) == (same.output_tokens, same.pause_s)
            assert len(words(turn.text)) == len(words(same.text))
            assert turn.text != same.text


def test_chat_has_one_system_prompt_and_turns_of_their_own() -> None:
    found = asked(Shape.CHAT, turns=3, prefix_tokens=50)
    assert len({session.system for session in found}) == 1
    assert len(words(found[0].system)) == 50
    texts = [turn.text for session in found for turn in session.turns]
    assert len(texts) == len(set(texts)) == 3 * len(found)


def test_rag_asks_documents_several_times_the_first_most() -> None:
    found = asked(Shape.RAG, 400, documents=4, prefix_tokens=30)
    documents = [session.turns[0].text.partition("\n\nQuestion: ")[0] for session in found]
    counts = sorted((documents.count(one) for one in set(documents)), reverse=True)
    assert len(counts) == 4
    assert counts[0] > 400 * 0.4  # 12/25 of them by weight
    assert counts[-1] > 400 * 0.05
    assert not any(session.system for session in found)


def test_agent_pauses_for_its_tools_and_goes_on_with_their_results() -> None:
    found = asked(Shape.AGENT, turns=4, pause_s=0.5)
    later = [turn for session in found for turn in session.turns[1:]]
    assert all(turn.text.startswith("Result of the tool: ") for turn in later)
    assert all(session.turns[0].pause_s == 0 for session in found)
    assert 0.3 < sum(turn.pause_s for turn in later) / len(later) < 0.7


def test_oneshot_shares_nothing() -> None:
    found = asked(Shape.ONESHOT)
    assert not any(session.system for session in found)
    assert len({session.turns[0].text[:40] for session in found}) == len(found)


def test_lengths_are_in_tokens_of_the_server_and_spread() -> None:
    found = asked(Shape.ONESHOT, 200, words_per_token=0.5, prompt_tokens=100, output_tokens=40)
    lengths = [len(words(session.turns[0].text)) for session in found]
    assert (min(lengths) >= 25, max(lengths) <= 75) == (True, True)
    assert 45 < sum(lengths) / len(lengths) < 55
    exact = asked(Shape.ONESHOT, 20, spread=0.0, prompt_tokens=100, output_tokens=40)
    assert {(len(words(one.turns[0].text)), one.turns[0].output_tokens) for one in exact} == {(100, 40)}


def test_a_trace_s_prompts_share_what_its_blocks_do_and_come_as_fast_as_asked() -> None:
    lines = [
        {"timestamp": 5000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 9, 2]},
        {"timestamp": 9000, "input_length": 1200, "output_length": 9, "hash_ids": [4, 9, 5]},
        {"timestamp": 9000, "input_length": 100, "output_length": 1, "hash_ids": []},
    ]
    rows, block_tokens = parse_rows(json.dumps(line) for line in lines)
    plan = BenchPlan(Shape.TRACE, SIZES[Shape.TRACE], rows=rows, block_tokens=block_tokens, speed=2.0)
    first, second, third = plan.sessions(0.5)
    assert [one.at_s for one in (first, second, third)] == [0.0, 2.0, 2.0]
    ours, others = words(first.turns[0].text), words(second.turns[0].text)
    assert (len(ours), len(others), len(words(third.turns[0].text))) == (550, 600, 50)
    assert ours[:512] == others[:512]
    assert ours[512:] != others[512:550]
    assert [one.turns[0].output_tokens for one in (first, second, third)] == [7, 9, 1]
    assert plan.is_open
    assert plan.arrivals() is None


def test_sessions_arrive_as_a_poisson_process_of_the_rate_asked_for() -> None:
    sizes = ShapeSizes(0, 10, 10, turns=5, documents=1, pause_s=0.0)
    arrivals = BenchPlan(Shape.CHAT, sizes, seed=1, rate=50.0).arrivals()  # 10 sessions/s
    assert arrivals is not None
    at = list(islice(arrivals, 4000))
    gaps = [after - before for before, after in pairwise(at)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.05)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.08)  # exponential


def test_progress_is_that_of_the_limit_which_ends_first() -> None:
    assert LoadLimits(10, 100.0, None).done(5, 20.0) == 0.5
    assert LoadLimits(10, 100.0, None).done(1, 90.0) == 0.9
    assert LoadLimits(None, 10.0, 4).done(9, 12.0) == 1.0
    assert LoadLimits(None, None, None).done(3, 1.0) is None
