"""Scores of a prompt: of each token but the first, once, before anything is generated."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rigs import CONTEXT, EngineRig, Stream, greedy, sampled, whole

from kvproto.errors import InvalidRequest
from kvproto.messages import ChoiceFinished, FinishReason, Overflow, TokenLogprobs
from tests.support.waiting import until

LONG = 700  # tokens: several steps of any engine
CLOSE = 2e-4  # vLLM computes chunks and batches in other orders


def same(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    return one.logprob == pytest.approx(other.logprob, abs=CLOSE) and all(
        mine == pytest.approx(others, abs=CLOSE)
        for mine, others in zip(one.top_logprobs, other.top_logprobs, strict=True)
    )


def all_same(some: Stream, others: Stream, skip: int = 0) -> bool:
    return len(some.scores) == len(others.scores) - skip and all(map(same, some.scores, others.scores[skip:]))


async def test_each_token_of_a_prompt_but_the_first_has_a_score(rig: EngineRig) -> None:
    prompt = rig.prompt(LONG)
    asked = rig.spec("scored", prompt, greedy(8, prompt_logprobs=3), scored=0)
    scored = await rig.run(asked)
    plain = await rig.run(rig.spec("plain", prompt, greedy(8), root=rig.other_root))
    assert scored.result == plain.result
    assert len(scored.scores) == LONG - 1
    for token, one in zip(prompt[1:], scored.scores, strict=True):
        assert one.logprob < 0
        assert len(one.top_ids) == len(set(one.top_ids)) == 3
        assert list(one.top_logprobs) == sorted(one.top_logprobs, reverse=True)
        if token in one.top_ids:
            at = one.top_ids.index(token)
            assert one.logprob == pytest.approx(one.top_logprobs[at], abs=1e-6)
            assert at < one.rank <= 3
        else:
            assert one.rank > 3
            assert one.logprob <= one.top_logprobs[-1]


async def test_the_most_probable_continuation_scores_as_it_was_generated(rig: EngineRig) -> None:
    prompt = rig.prompt(40)
    generated = await rig.run(rig.spec("generated", prompt, greedy(12, logprobs=2)))
    again = rig.spec("scored", [*prompt, *generated.ids], greedy(1, prompt_logprobs=2), scored=0)
    scored = (await rig.run(again)).scores[-12:]
    assert [one.rank for one in scored] == [1] * 12
    assert all(map(same, scored, generated.logprobs))


async def test_nothing_need_be_generated(rig: EngineRig) -> None:
    prompt = rig.prompt(LONG)
    alone, beside = await rig.run_all(
        rig.spec("alone", prompt, greedy(0, prompt_logprobs=1), scored=0),
        rig.spec("beside", prompt, sampled(4, prompt_logprobs=1), scored=0, root=rig.other_root),
    )
    assert alone.result == ((), "", FinishReason.LENGTH)
    assert len(beside.ids) == 4
    assert all_same(alone, beside)


async def test_no_alternatives_need_be_told(rig: EngineRig) -> None:
    stream = await rig.run(rig.spec("r", rig.prompt(30), greedy(0, prompt_logprobs=0), scored=0))
    assert [one.top_ids for one in stream.scores] == [()] * 29
    assert all(one.rank > 0 for one in stream.scores)


async def test_a_prompt_of_one_token_has_no_scores(rig: EngineRig) -> None:
    one, none = await rig.run_all(
        rig.spec("one", rig.prompt(1), greedy(1, prompt_logprobs=1), scored=0),
        rig.spec("none", rig.prompt(1, 1), greedy(0, prompt_logprobs=1), scored=0),
    )
    assert (len(one.ids), one.scores) == (1, ())
    assert (none.result, none.scores) == (((), "", FinishReason.LENGTH), ())


async def test_cached_blocks_give_no_scores_and_scored_ones_are_cached(rig: EngineRig) -> None:
    prompt = rig.prompt(LONG)
    first, second = [
        await rig.run(rig.spec(name, prompt, greedy(4, prompt_logprobs=2), scored=0)) for name in ("first", "second")
    ]
    assert first.result == second.result
    assert all_same(first, second)
    assert second.cached_tokens == 0
    plain = await rig.run(rig.spec("plain", prompt, greedy(4)))
    assert plain.cached_tokens >= whole(LONG - 1)
    assert plain.result == first.result


@pytest.mark.parametrize("known", [1, 2, 300, LONG - 1, LONG])
async def test_scores_that_the_reader_has_do_not_come_again(rig: EngineRig, known: int) -> None:
    prompt = rig.prompt(LONG)
    all_of_them = await rig.run(rig.spec("all", prompt, greedy(4, prompt_logprobs=2), scored=0))
    rest = await rig.run(rig.spec("rest", prompt, greedy(4, prompt_logprobs=2), scored=known, attempt=1))
    assert rest.result == all_of_them.result
    assert all_same(rest, all_of_them, known - 1)


async def test_a_continued_attempt_whose_prompt_is_scored_is_like_any_other(rig: EngineRig) -> None:
    prompt, asked = rig.prompt(60), sampled(12, prompt_logprobs=2)
    whole_one = await rig.run(rig.spec("r", prompt, asked, scored=0))
    sent = len("".join(whole_one.pieces[:5]))
    spec = rig.spec("r", prompt, asked, attempt=1, output_ids=whole_one.ids[:5], text_sent=sent, scored=60)
    rest = await rig.run(spec)
    assert rest.scores == ()
    assert rest.ids == whole_one.ids[5:]


async def test_one_choice_scores_the_prompt_for_all(rig: EngineRig) -> None:
    prompt, asked = rig.prompt(80), sampled(6, n=3, prompt_logprobs=1)
    specs = [rig.spec("r", prompt, asked, choice=at, scored=None if at else 0) for at in range(3)]
    streams = await rig.run_all(*specs)
    assert [len(stream.scores) for stream in streams] == [79, 0, 0]
    plain = [rig.spec("p", prompt, replace(asked, prompt_logprobs=None), choice=at) for at in range(3)]
    assert [stream.result for stream in streams] == [stream.result for stream in await rig.run_all(*plain)]


async def test_the_token_that_ended_it_is_told_with_its_score(rig: EngineRig) -> None:
    eos = rig.eos_ids[0]
    asked = greedy(4, ignore_eos=False, logit_bias={eos: 100.0}, logprobs=2, prompt_logprobs=1)
    stream = await rig.run(rig.spec("r", rig.prompt(20), asked, scored=0))
    assert isinstance(stream.end, ChoiceFinished)
    assert stream.result == ((), "", FinishReason.STOP)
    assert stream.end.stop_token is not None
    assert stream.end.stop_token.id == eos
    assert len(stream.end.stop_token.logprobs.top_ids) == 2
    assert stream.end.stop_token.logprobs.logprob <= stream.end.stop_token.logprobs.top_logprobs[0]
    plain = await rig.run(rig.spec("plain", rig.prompt(20), replace(asked, logprobs=None), scored=0))
    assert isinstance(plain.end, ChoiceFinished)
    assert plain.end.stop_token is None


async def test_a_pause_neither_repeats_nor_loses_a_score(rig: EngineRig) -> None:
    prompt = rig.prompt(CONTEXT - 8)
    calm = await rig.run(rig.spec("calm", prompt, greedy(4, prompt_logprobs=1), scored=0))
    paused = rig.spec("paused", prompt, greedy(4, prompt_logprobs=1), scored=0, root=rig.other_root)
    rig.submit(paused)
    for _ in range(3):
        rig.engine.pause("paused", 0)
        rig.engine.resume("paused", 0)
        await asyncio.sleep(0.01)
    await rig.until(("paused", 0, 0))
    stream = rig.stream(("paused", 0, 0))
    assert stream.result == calm.result
    assert all_same(stream, calm)


async def test_a_cancel_ends_a_prompt_that_is_being_scored(rig: EngineRig) -> None:
    spec = rig.spec("r", rig.prompt(CONTEXT - 8), greedy(4, prompt_logprobs=1), scored=0)
    rig.submit(spec)
    rig.engine.cancel("r", 0)
    await rig.until(("r", 0, 0))
    await until(lambda: rig.engine.measured[0].running == 0)
    after = await rig.run(rig.spec("after", rig.prompt(40, 1), greedy(4, prompt_logprobs=1), scored=0))
    assert len(after.scores) == 39


@pytest.mark.parametrize("overflow", [Overflow.SLIDING, Overflow.TRUNCATE_LEFT])
async def test_a_prompt_that_may_lose_its_beginning_is_not_scored(rig: EngineRig, overflow: Overflow) -> None:
    asked = greedy(4, prompt_logprobs=1, overflow=overflow)
    stream = await rig.run(rig.spec("r", rig.prompt(40), asked, scored=0))
    assert isinstance(stream.error, InvalidRequest)
    assert stream.error.field == "context_overflow"
