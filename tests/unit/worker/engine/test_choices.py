"""Several choices of one prompt: computed once, shared block by block, each with tokens of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_rig import Transcript, expected_tokens, make_engine, spec

from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.fake import FakeRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import Cancelled, EngineFailure
from kvproto.messages import FinishReason, Sampling
from kvsampling.draw import Drawn
from tests.support.id_detokenizer import IdDetokenizer, IdStream

PROMPT = tuple(range(100, 121))


def ask(max_tokens: int = 8, n: int = 4, **fields: object) -> Sampling:
    return Sampling(max_tokens, **({"temperature": 1.0, "seed": 3, "n": n} | fields))  # type: ignore[arg-type]


def add_choices(engine: Engine, prompt: Sequence[int], sampling: Sampling, **fields: object) -> None:
    for choice in range(sampling.n):
        engine.add(spec("r", prompt, sampling=sampling, choice=choice, **fields))


def check_tokens(transcript: Transcript, prompt: Sequence[int], sampling: Sampling) -> None:
    assert len(transcript.ends) == sampling.n
    for choice in range(sampling.n):
        assert transcript.tokens["r", choice] == expected_tokens(prompt, sampling, choice=choice)
    if sampling.max_tokens > 4:
        assert len({tuple(tokens) for tokens in transcript.tokens.values()}) == sampling.n


@pytest.mark.parametrize("max_tokens", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 21])
@pytest.mark.parametrize("budget", [5, 64])
def test_the_prompt_is_fed_once(max_tokens: int, length: int, budget: int) -> None:
    """Each further choice runs the last token of the prompt again, for its logits, and nothing else of it."""
    engine, sampling = make_engine(token_budget=budget, block_size=4), ask(max_tokens)
    add_choices(engine, PROMPT[:length], sampling)
    transcript = Transcript(by_choice=True).run(engine)
    check_tokens(transcript, PROMPT[:length], sampling)
    assert transcript.fed == length + 3 + 4 * (max_tokens - 1)
    assert sorted(started.cached_tokens for started in transcript.started.values()) == [0] + 3 * [length - 1]
    load = engine.load()
    assert (load.prompt_tokens_total, load.hit_tokens_total) == (length, 0)


@pytest.mark.parametrize("length", [20, 21, 22])
def test_full_blocks_are_shared_and_the_tail_is_copied(length: int) -> None:
    """All of them in the step after the prompt is done."""
    engine, sampling = make_engine(block_size=4, slots=16, token_budget=24), ask(n=10)
    add_choices(engine, (*PROMPT, 1)[:length], sampling)
    assert engine.load().queued_prefill_tokens == length
    for running in (1, 10, 10):
        engine.step()
        engine.check_integrity()
        assert engine.load().running == running
    assert engine.pool.used == 5 + 10
    tails = [sequence.blocks[5] for sequence in engine.scheduler.running]
    assert len(set(tails)) == 10


def test_a_choice_that_comes_late_copies_from_one_that_runs() -> None:
    engine, sampling, transcript = make_engine(block_size=4, slots=1), ask(n=3), Transcript(by_choice=True)
    add_choices(engine, PROMPT, sampling)
    transcript.run(engine)
    check_tokens(transcript, PROMPT, sampling)
    assert transcript.fed == 21 + 2 + 3 * 7
    engine, transcript = make_engine(block_size=4), Transcript(by_choice=True)
    engine.add(spec("r", PROMPT, sampling=sampling))
    for _ in range(5):
        transcript.take(engine.step())
    for choice in (1, 2):
        engine.add(spec("r", PROMPT, sampling=sampling, choice=choice))
    transcript.run(engine)
    check_tokens(transcript, PROMPT, sampling)
    assert transcript.fed == 21 + 2 + 3 * 7


def test_cached_prefix_counts_once_and_serves_all() -> None:
    engine, sampling = make_engine(block_size=4), ask()
    engine.add(spec("before", PROMPT[:18], max_tokens=1))
    Transcript().run(engine)
    add_choices(engine, PROMPT, sampling)
    transcript = Transcript(by_choice=True).run(engine)
    check_tokens(transcript, PROMPT, sampling)
    assert transcript.fed == 3 + 3 + 4 * 7
    assert engine.load().hit_tokens_total == 18


def test_choices_go_on_with_outputs_of_their_own() -> None:
    sampling = ask(8, n=3)
    expected = [expected_tokens(PROMPT, sampling, choice=choice) for choice in range(3)]
    engine = make_engine(block_size=4)
    for choice, done in enumerate((2, 7, 0)):
        outputs = tuple(expected[choice][:done])
        engine.add(spec("r", PROMPT, attempt=1, sampling=sampling, choice=choice, output_ids=outputs))
    transcript = Transcript(by_choice=True).run(engine)
    for choice, done in enumerate((2, 7, 0)):
        assert transcript.tokens["r", choice] == expected[choice][done:]
        assert transcript.finished["r", choice].output_tokens == 8
    # The first runs its 23 tokens; the others what is theirs alone, and at least one: 7 and the prompt's last one.
    assert transcript.fed == 23 + 7 + 1 + (8 - 3) + 0 + 7


@pytest.mark.parametrize("fate", ["fails", "is preempted"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_others_go_on_when_the_one_that_computes_goes(fate: str, steps: int) -> None:
    engine, sampling = make_engine(block_size=4, token_budget=8), ask()
    transcript = Transcript(by_choice=True)
    add_choices(engine, PROMPT, sampling)
    for _ in range(steps):
        transcript.take(engine.step())
    leader = engine.scheduler.running[0]
    if fate == "fails":
        engine._fail(leader, EngineFailure("on its own"))
    else:
        engine.scheduler._preempt(leader)
    engine.check_integrity()
    transcript.run(engine)
    for choice in range(1 if fate == "fails" else 0, 4):
        assert transcript.tokens["r", choice] == expected_tokens(PROMPT, sampling, choice=choice)
    assert transcript.fed <= 21 + 4 + 4 * 7 + 4  # what was computed is found again, a partial block aside


def test_cancel_pause_and_resume_are_for_all_choices_of_an_attempt() -> None:
    engine, sampling, transcript = make_engine(slots=2), ask(), Transcript(by_choice=True)
    add_choices(engine, PROMPT, sampling)
    for _ in range(3):
        transcript.take(engine.step())
    engine.pause("r", 0)
    assert not engine.has_work
    assert engine.pool.used == 0
    engine.check_integrity()
    engine.resume("r", 0)
    for _ in range(2):
        transcript.take(engine.step())
    assert len(engine.scheduler.running) == 2
    engine.cancel("r", 1)
    engine.cancel("r", 0)
    transcript.run(engine)
    assert [type(end) for end in transcript.ends.values()] == [Cancelled] * 4
    assert engine.pool.used == 0


class OneBadChoice(FakeRunner):
    """Cannot draw the third token of choice 1."""

    def run(self, slices: Sequence[Slice]) -> list[Drawn]:
        drawn = super().run(slices)
        for at, part in enumerate(slices):
            if part.draw is not None and (part.draw.choice, part.draw.index) == (1, 2):
                drawn[at] = EngineFailure("not finite")
        return drawn


def test_a_draw_that_fails_ends_its_choice_alone() -> None:
    engine = make_engine(runner=OneBadChoice(num_blocks=64, block_size=4, vocab_size=1000, context_length=64))
    sampling = ask()
    add_choices(engine, PROMPT, sampling)
    transcript = Transcript(by_choice=True).run(engine)
    assert isinstance(transcript.ends["r", 1], EngineFailure)
    for choice in (0, 2, 3):
        assert transcript.ends["r", choice] is FinishReason.LENGTH
        assert transcript.tokens["r", choice] == expected_tokens(PROMPT, sampling, choice=choice)


class SecondStreamBroken(IdDetokenizer):
    made = 0

    def stream(self, prompt_ids: Sequence[int]) -> IdStream:
        self.made += 1
        stream = IdStream()
        if self.made == 2:
            stream.push = lambda token: str(1 // 0)  # type: ignore[method-assign]
        return stream


def test_text_that_cannot_be_made_ends_its_choice_alone() -> None:
    engine, sampling = make_engine(detokenizer=SecondStreamBroken()), ask(n=3)
    add_choices(engine, PROMPT, sampling)
    transcript = Transcript(by_choice=True).run(engine)
    assert isinstance(transcript.ends["r", 1], EngineFailure)
    assert [transcript.ends["r", choice] for choice in (0, 2)] == [FinishReason.LENGTH] * 2
