"""Beam search in the engine: what is shared, what is told, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from engine_rig import ROOT, Clock, Transcript, expected_beams, expected_tokens, make_engine, spec

from kvfleet.worker.engine.engine import Engine
from kvproto.block_hash import chain
from kvproto.errors import Cancelled, DeadlineExceeded, EngineFailure, InvalidRequest, KvfleetError, OutOfMemory
from kvproto.messages import Beams, FinishReason, Grammar, GrammarForm, Overflow, Sampling, Tokens

PROMPT = tuple(range(100, 121))


def ask(max_tokens: int = 8, width: int = 4, n: int = 2, **fields: object) -> Sampling:
    beams = Beams(width, **{name: fields.pop(name) for name in ("length_penalty", "early_stopping") if name in fields})  # type: ignore[arg-type]
    return Sampling(max_tokens, n=n, beams=beams, **fields)  # type: ignore[arg-type]


def add(engine: Engine, sampling: Sampling, name: str = "r", prompt: Sequence[int] = PROMPT, **fields: object) -> None:
    for choice in range(sampling.n):
        engine.add(spec(name, prompt, sampling=sampling, choice=choice, **fields))


def outputs(sampling: Sampling, prompt: Sequence[int] = PROMPT, **fields: object) -> list[list[int]]:
    found = expected_beams(prompt, sampling, **fields)  # type: ignore[arg-type]
    return [[beam.token for beam in one.output] for one in found[: sampling.n]]


def told(transcript: Transcript, sampling: Sampling, name: str = "r") -> list[list[int]]:
    return [transcript.tokens[name, choice] for choice in range(sampling.n)]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("length", [1, 16, 21])
def test_the_prompt_is_fed_once_and_nothing_is_told_before_the_end(length: int, budget: int, overlaps: bool) -> None:
    engine, sampling, transcript = make_engine(token_budget=budget), ask(), Transcript(by_choice=True)
    engine.runner.overlaps = overlaps
    add(engine, sampling, prompt=PROMPT[:length])
    while engine.has_work:
        assert not transcript.tokens
        transcript.take(engine.step())
        engine.check_integrity()
    assert told(transcript, sampling) == outputs(sampling, PROMPT[:length])
    assert transcript.ends == {("r", 0): FinishReason.LENGTH, ("r", 1): FinishReason.LENGTH}
    assert transcript.fed == length + 4 * 7
    assert engine.pool.used == 0
    load = engine.load()
    assert (load.prompt_tokens_total, load.generated_tokens_total) == (length, 16)


def test_blocks_are_shared_until_beams_differ() -> None:
    """The prompt's are held once; a step copies fewer than one for each beam."""
    engine, sampling, width, peak, copies = make_engine(slots=8, blocks=200), ask(64, width=8, n=1), 8, 0, []
    copy_blocks = engine.runner.copy_blocks
    engine.runner.copy_blocks = lambda some: (copies.append(len(some)), copy_blocks(some))[1]  # type: ignore[method-assign]
    prompt = tuple(range(200, 280))
    add(engine, sampling, prompt=prompt)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        peak = max(peak, engine.pool.used)
        assert engine.load().running in (0, width)
    whole = (len(prompt) + 64) // 4
    assert whole <= peak < width * whole / 3
    assert 0 < max(copies) < width


def test_of_beams_only_what_is_told_is_listed_and_only_at_the_end() -> None:
    """The next turn finds the answer; nothing is there of which nobody knows."""
    engine, sampling, transcript = make_engine(), ask(20, n=2), Transcript(by_choice=True)
    add(engine, sampling, "cancelled")
    add(engine, sampling)
    for _ in range(15):
        transcript.take(engine.step())
        assert engine.pool.index.addressed <= len(PROMPT) // 4
    engine.cancel("cancelled", 0)
    transcript.run(engine)
    answers = [[*PROMPT, *output] for output in outputs(sampling)]
    assert told(transcript, sampling) == outputs(sampling)
    nameable = {block for answer in answers for block in chain(ROOT, answer, 4)}
    assert set(engine.pool.index.hashes()) <= nameable
    assert set(chain(ROOT, answers[0], 4)) <= set(engine.pool.index.hashes())
    plain = Sampling(6, temperature=0.0)
    engine.add(spec("turn", [*answers[0], 7, 8, 9], sampling=plain))
    add(engine, sampling, "again")
    transcript.run(engine)
    assert transcript.started["turn", 0].cached_tokens == 40
    assert transcript.tokens["turn", 0] == expected_tokens([*answers[0], 7, 8, 9], plain)
    assert transcript.started["again", 0].cached_tokens == 20
    assert told(transcript, sampling, "again") == outputs(sampling)
    for answer in answers:
        engine.kv.erase(ROOT, answer, 0)
    engine.kv.erase(ROOT, [*answers[0], 7, 8, 9, *transcript.tokens["turn", 0]], 0)
    assert engine.pool.index.addressed == 0


def test_others_run_beside_it() -> None:
    engine, sampling, transcript = make_engine(slots=6), ask(12), Transcript(by_choice=True)
    plain = Sampling(12, temperature=0.0)
    engine.add(spec("plain", PROMPT[:7], sampling=plain))
    add(engine, sampling)
    add(engine, sampling, "late", prompt=PROMPT[3:])
    transcript.run(engine)
    assert transcript.tokens["plain", 0] == expected_tokens(PROMPT[:7], plain)
    assert told(transcript, sampling) == outputs(sampling)
    assert told(transcript, sampling, "late") == outputs(sampling, PROMPT[3:])


def test_long_answers_are_told_in_pieces_that_fit_a_message() -> None:
    engine, sampling, most = make_engine(blocks=400, block_size=8), ask(300, width=2, logprobs=3), 0
    add(engine, sampling)
    transcript = Transcript(by_choice=True)
    while engine.has_work:
        result = engine.step()
        transcript.take(result)
        most = max([most, *(len(one.ids) for one in result.outputs if isinstance(one, Tokens))])
    assert [len(ids) for ids in told(transcript, sampling)] == [300, 300]
    assert most == 128


def test_stop_tokens_and_log_probabilities() -> None:
    """Of each returned beam, those of its own tokens, and of the stop token that ended it."""
    free = outputs(ask(8, n=4))
    stop_ids = (free[0][4], free[1][6])
    sampling = ask(8, n=4, logprobs=2, stop_ids=stop_ids, ignore_eos=True)
    engine, transcript = make_engine(), Transcript(by_choice=True)
    add(engine, sampling)
    transcript.run(engine)
    found = expected_beams(PROMPT, sampling, stop_ids=stop_ids)
    assert told(transcript, sampling) == [[beam.token for beam in one.output] for one in found]
    assert FinishReason.STOP in transcript.ends.values()
    for choice, one in enumerate(found):
        assert transcript.logprobs["r", choice] == [beam.logprobs for beam in one.output]
        assert all(len(scored.top_ids) == 2 for scored in transcript.logprobs["r", choice])
        stop = transcript.finished["r", choice].stop_token
        assert (stop is not None) == one.by_token
        if stop is not None:
            assert (stop.id, stop.logprobs) == (one.last.token, one.last.logprobs)
        total = sum(scored.logprob for scored in transcript.logprobs["r", choice])
        total += stop.logprobs.logprob if stop is not None else 0
        assert one.score == pytest.approx(total / (len(one.output) + (stop is not None)))


def test_stop_strings_end_a_beam() -> None:
    """Ids are their text here: what has a string's token ends with it, and its text before it."""
    free = outputs(ask(8, n=4))
    word = f"{free[0][3]} {free[0][4]}"
    sampling = ask(8, n=4, stop=(word,))
    engine, transcript = make_engine(), Transcript(by_choice=True)
    add(engine, sampling)
    transcript.run(engine)
    stopped = [choice for choice in range(4) if transcript.ends["r", choice] is FinishReason.STOP]
    assert stopped
    for choice in range(4):
        ids = transcript.tokens["r", choice]
        assert (choice in stopped) == (word in " ".join(map(str, ids)))
        if choice in stopped:
            assert ids[-2:] == free[0][3:5]
            assert transcript.text["r", choice] == "".join(f"{one} " for one in ids[:-2])
            assert transcript.finished["r", choice].stop == word


def test_a_choice_that_was_told_in_part_goes_on_there() -> None:
    """By a worker that was lost while it told them: choice 1 has been told whole."""
    sampling = ask(8, n=3)
    expected = outputs(sampling)
    engine, transcript = make_engine(), Transcript(by_choice=True)
    for choice, count in ((0, 5), (2, 0)):
        known = tuple(expected[choice][:count])
        chars = len("".join(f"{one} " for one in known))
        engine.add(
            spec("r", PROMPT, sampling=sampling, choice=choice, attempt=1, output_ids=known, text_sent=chars)
        )  # fmt: skip
    transcript.run(engine)
    assert transcript.tokens == {("r", 0): expected[0][5:], ("r", 2): expected[2]}
    assert transcript.first_index["r", 0] == 5
    assert transcript.finished["r", 0].output_tokens == 8
    engine, transcript = make_engine(), Transcript(by_choice=True)
    engine.add(spec("r", PROMPT, sampling=ask(8, n=1), attempt=1, output_ids=(expected[0][0] + 1,)))
    assert isinstance(transcript.run(engine).ends["r", 0], EngineFailure)
    assert engine.pool.used == 0


def test_a_search_that_is_pushed_out_or_paused_begins_again() -> None:
    engine, sampling, transcript = make_engine(slots=4), ask(12), Transcript(by_choice=True)
    add(engine, sampling)
    for _ in range(6):
        transcript.take(engine.step())
    engine.add(spec("high", PROMPT[:9], priority=5))
    transcript.take(engine.step())
    assert (engine.load().preemptions_total, engine.load().running) == (1, 1)
    for _ in range(14):
        transcript.take(engine.step())
        engine.check_integrity()
    assert engine.load().running == 4
    engine.pause("r", 0)
    engine.check_integrity()
    assert (engine.has_work, engine.pool.used) == (False, 0)
    engine.resume("r", 0)
    assert told(transcript.run(engine), sampling) == outputs(sampling)


def test_all_choices_end_together() -> None:
    clock = Clock()
    for way in ("cancel", "deadline", "let go"):
        engine, sampling, transcript = make_engine(clock=clock), ask(12), Transcript(by_choice=True)
        add(engine, sampling, deadline=clock.now + 1)
        for _ in range(6):
            transcript.take(engine.step())
        error: type[KvfleetError] = Cancelled
        if way == "cancel":
            assert engine.cancel("r", 0) == 2
        elif way == "let go":
            engine.let_go([("r", 0)], keep=True)
        else:
            clock.now, error = clock.now + 2, DeadlineExceeded
        transcript.run(engine)
        assert not transcript.tokens
        ends = [] if way == "let go" else [error] * 2
        assert [type(end) for end in transcript.ends.values()] == ends
        assert (engine.pool.used, len(list(engine.sequences))) == (0, 0)


def test_one_that_does_not_fit_fails_alone() -> None:
    """At once where its prompt and a tail of each beam do not, else when its beams have grown apart too far."""
    engine, transcript = make_engine(blocks=12), Transcript(by_choice=True)
    with pytest.raises(OutOfMemory):
        add(engine, ask(8, width=7), prompt=tuple(range(300, 325)))
    add(engine, ask(40, width=6), "large")
    plain = Sampling(6, temperature=0.0)
    engine.add(spec("plain", PROMPT[:7], sampling=plain))
    transcript.run(engine)
    assert isinstance(transcript.ends["large", 0], OutOfMemory)
    assert isinstance(transcript.ends["large", 1], OutOfMemory)
    assert transcript.tokens["plain", 0] == expected_tokens(PROMPT[:7], plain)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"n": 5}, "best_of"),
        ({"width": 9}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"grammar": Grammar(GrammarForm.REGEX, "a+", "guided_regex")}, "guided_regex"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"overflow": Overflow.SLIDING}, "context_overflow"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(wrong: dict[str, object], field: str) -> None:
    engine = make_engine(slots=8)
    with pytest.raises(InvalidRequest) as caught:
        add(engine, ask(**wrong))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert not engine.has_work


def test_fewer_sequences_than_are_wanted_are_an_error() -> None:
    sampling = ask(3, width=4, n=4)
    engine, transcript = make_engine(vocab_size=2), Transcript(by_choice=True)
    add(engine, replace(sampling, max_tokens=1), prompt=(1, 0, 1))
    transcript.run(engine)
    assert {type(end) for end in transcript.ends.values()} == {InvalidRequest}
