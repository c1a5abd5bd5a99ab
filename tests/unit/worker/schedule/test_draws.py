"""What a slice says about its draw, and the log probabilities that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from engine_rig import Transcript, expected_tokens, make_engine, spec

from kvfleet.worker.model.fake import FakeRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.messages import FinishReason, Sampling, TokenLogprobs
from kvsampling.draw import Draw, Drawn, Scored

GREEDY8 = Sampling(8, temperature=0.0)


class NotingRunner(FakeRunner):
    """Keeps what draws say, and scores each token that a request wants scored by its index."""

    def __init__(self, **fake: object) -> None:
        super().__init__(num_blocks=64, block_size=4, vocab_size=1000, context_length=64, **fake)  # type: ignore[arg-type]
        self.draws: list[Draw] = []

    def run(self, slices: Sequence[Slice]) -> list[Drawn]:
        drawn = super().run(slices)
        for at, part in enumerate(slices):
            if (draw := part.draw) is not None:
                self.draws.append(replace(draw, output_ids=tuple(draw.output_ids)))
                scored = drawn[at]
                if isinstance(scored, Scored):
                    token, score = scored.token, -float(draw.index)
                    drawn[at] = Scored(token, TokenLogprobs(score, (token,), (score,)))
        return drawn


def draws_of(
    sampling: Sampling, prompt: Sequence[int] = (1, 2, 3), eos: int | None = None, **fields: object
) -> list[Draw]:
    runner = NotingRunner(eos_ids=() if eos is None else (eos,))
    engine = make_engine(runner=runner)
    engine.add(spec("r", prompt, sampling=sampling, **fields))
    Transcript().run(engine)
    return runner.draws


def test_a_draw_carries_nothing_that_was_not_asked_for() -> None:
    assert draws_of(GREEDY8, eos=1) == [Draw(GREEDY8, 0, index) for index in range(8)]


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("done", [0, 3])
def test_penalties_get_all_that_came_before(field: str, done: int) -> None:
    expected = expected_tokens([1, 2, 3], GREEDY8)
    draws = draws_of(replace(GREEDY8, **{field: 1.5}), output_ids=tuple(expected[:done]))  # type: ignore[arg-type]
    assert [draw.index for draw in draws] == list(range(done, 8))
    for draw in draws:
        assert tuple(draw.prompt_ids) == (1, 2, 3)
        assert draw.output_ids == tuple(expected[: draw.index])


def test_what_would_stop_is_banned_until_enough_tokens_are_out() -> None:
    sampling = replace(GREEDY8, min_tokens=3, stop_ids=(7, 5))
    assert [draw.banned for draw in draws_of(sampling, eos=999)] == [(5, 7, 999)] * 3 + [()] * 5
    assert [draw.banned for draw in draws_of(replace(sampling, ignore_eos=True), eos=999)] == [(5, 7)] * 3 + [()] * 5


def test_every_token_comes_with_its_logprobs() -> None:
    engine = make_engine(runner=NotingRunner())
    engine.add(spec("scored", [1, 2, 3], sampling=replace(GREEDY8, logprobs=0)))
    engine.add(spec("plain", [4, 5, 6]))
    transcript = Transcript().run(engine)
    assert transcript.tokens["scored", 0] == expected_tokens([1, 2, 3], GREEDY8)
    assert [entry.logprob for entry in transcript.logprobs["scored", 0]] == [-float(at) for at in range(8)]
    assert transcript.logprobs["plain", 0] == []


def test_logprobs_stay_with_their_ids_while_text_is_held_and_when_it_is_cut() -> None:
    expected = expected_tokens([1, 2, 3], GREEDY8)
    held = f"{expected[1]} {expected[2]} no"  # begins twice as long as a token, and never comes
    stop = f"{str(expected[4])[-1]} {expected[5]} "
    engine = make_engine(runner=NotingRunner())
    engine.add(spec("r", [1, 2, 3], sampling=replace(GREEDY8, logprobs=1, stop=(held, stop))))
    transcript = Transcript().run(engine)
    assert transcript.ends["r", 0] is FinishReason.STOP
    assert transcript.tokens["r", 0] == expected[:6]
    assert [entry.top_ids for entry in transcript.logprobs["r", 0]] == [(token,) for token in expected[:6]]


@pytest.mark.parametrize("done", range(1, 7))
def test_a_later_attempt_scores_the_tokens_that_it_draws(done: int) -> None:
    """Also where the last known ones are still held back, because a stop string may begin in them."""
    expected = expected_tokens([1, 2, 3], GREEDY8)
    sampling = replace(GREEDY8, logprobs=0, stop=(f"{expected[3]} {expected[4]} {expected[5]} no",))
    engine = make_engine(runner=NotingRunner())
    engine.add(spec("r", [1, 2, 3], attempt=1, sampling=sampling, output_ids=tuple(expected[:done])))
    transcript = Transcript().run(engine)
    assert transcript.tokens["r", 1] == expected[done:]
    assert [entry.logprob for entry in transcript.logprobs["r", 1]] == [-float(at) for at in range(done, 8)]
