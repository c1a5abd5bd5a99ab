"""The engine's promises on the fake runner: what is refused, what is reused, how sequences end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from engine_rig import ROOT, Clock, Transcript, expected_tokens, make_engine, spec

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.fake import FakeRunner
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import (
    Cancelled,
    ContextLengthExceeded,
    EngineFailure,
    InvalidRequest,
    KvfleetError,
    OutOfMemory,
)
from kvproto.messages import FinishReason, Sampling
from kvsampling.draw import Drawn
from tests.support.id_detokenizer import IdDetokenizer, IdStream

GREEDY8 = Sampling(8, temperature=0.0)


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("fields", "error", "field", "says"),
    [
        ({"prompt": []}, InvalidRequest, "prompt_ids", "at least 1"),
        ({"prompt": [1000]}, InvalidRequest, "prompt_ids", "0 to 999"),
        ({"prompt": [-1]}, InvalidRequest, "prompt_ids", "0 to 999"),
        ({"prompt": [1], "output_ids": (1000,)}, InvalidRequest, "output_ids", "0 to 999"),
        ({"prompt": [1] * 64}, ContextLengthExceeded, "prompt_ids", "at most 63"),
        ({"prompt": [1] * 70}, ContextLengthExceeded, "prompt_ids", "has 70 tokens, the context of 64"),
        ({"prompt": [1], "sampling": Sampling(0)}, InvalidRequest, "max_tokens", "at least 1"),
        ({"prompt": [1], "sampling": Sampling(1, temperature=-0.1)}, InvalidRequest, "temperature", "at least 0"),
        ({"prompt": [1], "sampling": Sampling(1, temperature=float("nan"))}, InvalidRequest, "temperature", "at least"),
        ({"prompt": [1], "sampling": Sampling(1, top_p=1.5)}, InvalidRequest, "top_p", "0 to 1"),
        ({"prompt": [1], "sampling": Sampling(1, top_k=-1)}, InvalidRequest, "top_k", "at least 0"),
        ({"prompt": [1] * 40}, OutOfMemory, None, "10 blocks are needed, this worker has 8"),
    ],
)
def test_refusals_name_field_and_limit(
    fields: dict[str, object], error: type[KvfleetError], field: str | None, says: str
) -> None:
    engine = make_engine(blocks=8, context_length=64)
    with pytest.raises(error, match=says) as raised:
        engine.add(spec("r", **fields))  # type: ignore[arg-type]
    assert raised.value.field == field
    assert not engine.has_work
    engine.check_integrity()


def test_same_attempt_twice_is_refused_and_the_first_goes_on() -> None:
    engine = make_engine()
    engine.add(spec("r", [1, 2]))
    with pytest.raises(InvalidRequest, match="running already"):
        engine.add(spec("r", [1, 2]))
    engine.add(spec("r", [1, 2], attempt=1))
    assert Transcript().run(engine).ends == {("r", 0): FinishReason.LENGTH, ("r", 1): FinishReason.LENGTH}


def test_more_tokens_than_the_context_leaves_are_refused() -> None:
    engine = make_engine(context_length=10)
    with pytest.raises(ContextLengthExceeded, match="the 6 tokens that the context of 10 leaves") as caught:
        engine.add(spec("r", [1, 2, 3, 4], max_tokens=7))
    assert caught.value.field == "max_tokens"
    engine.add(spec("r", [1, 2, 3, 4], max_tokens=6))
    transcript = Transcript().run(engine)
    assert len(transcript.tokens["r", 0]) == 6
    assert transcript.ends["r", 0] is FinishReason.LENGTH


def test_pool_and_runner_must_agree() -> None:
    pool = BlockPool(8, 4)
    with pytest.raises(ValueError, match="differ"):
        Engine(FakeRunner(num_blocks=8, block_size=16), pool, Scheduler(pool), IdDetokenizer())


# ---------------------------------------------------------------------- reused


def test_session_of_six_tokens_goes_on_with_its_tokens_cached() -> None:
    engine = make_engine(block_size=16)
    first, second = Transcript(), Transcript()
    engine.add(spec("turn1", [1, 2, 3, 4], max_tokens=2))
    first.run(engine)
    assert (first.fed, first.started["turn1", 0].cached_tokens) == (5, 0)  # the last token drawn is never fed
    history = [1, 2, 3, 4, *first.tokens["turn1", 0]]
    engine.add(spec("turn2", [*history, 7, 8], max_tokens=1))
    second.run(engine)
    assert second.started["turn2", 0].cached_tokens == 5
    assert second.fed == 3


@pytest.mark.parametrize("turns", [5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_turn_feeds_only_what_is_new(turns: int, block_size: int) -> None:
    engine = make_engine(block_size=block_size, blocks=256, token_budget=64)
    history: list[int] = []
    for turn in range(turns):
        prompt = [*history, *(turn * 10 + at for at in range(7))]
        engine.add(spec(f"turn{turn}", prompt, max_tokens=9))
        transcript = Transcript().run(engine)
        cached = max(len(history) - 1, 0)
        assert transcript.started[f"turn{turn}", 0].cached_tokens == cached
        assert transcript.fed == len(prompt) - cached + 9 - 1
        assert transcript.tokens[f"turn{turn}", 0] == expected_tokens(prompt, Sampling(9, temperature=0.0))
        history = prompt + transcript.tokens[f"turn{turn}", 0]


def test_same_prompt_again_feeds_one_token() -> None:
    engine = make_engine(block_size=4)
    for cached in (0, 15):
        engine.add(spec("r", range(16), max_tokens=1))
        transcript = Transcript().run(engine)
        assert transcript.started["r", 0].cached_tokens == cached
        assert transcript.fed == 16 - cached


def test_what_steps_cost_is_counted_for_whom_it_was() -> None:
    clock = Clock()

    class SlowRunner(FakeRunner):
        def run(self, slices: list[Slice]) -> list[Drawn]:
            clock.now += 0.5
            return super().run(slices)

    runner = SlowRunner(num_blocks=64, block_size=4, vocab_size=1000, context_length=512)
    engine = make_engine(runner=runner, clock=clock)
    engine.add(spec("a", range(12), max_tokens=3, tenant="a"))
    engine.add(spec("b", range(100, 104), max_tokens=1, tenant="b"))
    clock.now += 2.0  # they wait
    Transcript().run(engine)
    a, b = engine.counters.costs.of("a"), engine.counters.costs.of("b")
    assert (a.prompt_tokens, a.cached_tokens, a.generated_tokens) == (12, 0, 3)
    assert (b.prompt_tokens, b.cached_tokens, b.generated_tokens) == (4, 0, 1)
    assert engine.counters.steps_total == 3
    assert engine.counters.busy_seconds_total == pytest.approx(1.5)
    assert b.engine_seconds == pytest.approx(0.5 * 4 / 16), "of the first step; the others were a's alone"
    assert a.engine_seconds + b.engine_seconds == pytest.approx(engine.counters.busy_seconds_total)
    assert (engine.counters.queue_waits.count, engine.counters.queue_waits.sum) == (2, pytest.approx(4.0))
    assert engine.counters.device_hit_tokens_total == 0
    engine.add(spec("c", range(12), max_tokens=1, tenant="a"))
    Transcript().run(engine)
    assert engine.counters.device_hit_tokens_total == a.cached_tokens == 11


def test_fork_of_a_session_shares_blocks_and_copies_the_tail() -> None:
    engine = make_engine(block_size=4, blocks=32)
    engine.add(spec("parent", range(10), max_tokens=1))
    Transcript().run(engine)
    forks = {f"fork{at}": [*range(10), 50 + at, 60 + at] for at in range(4)}
    for name, prompt in forks.items():
        engine.add(spec(name, prompt))
    transcript = Transcript().run(engine)
    for name, prompt in forks.items():
        assert transcript.started[name, 0].cached_tokens == 10
        assert transcript.tokens[name, 0] == expected_tokens(prompt, GREEDY8)


def test_other_root_shares_nothing() -> None:
    engine = make_engine()
    engine.add(spec("mine", range(10)))
    Transcript().run(engine)
    other = spec("theirs", range(10))
    engine.add(type(other)(other.request, 0, other.prompt_ids, other.sampling, b"another tenant's"))
    assert Transcript().run(engine).started["theirs", 0].cached_tokens == 0


def test_locate_and_read_kv_see_what_is_cached() -> None:
    engine = make_engine(block_size=4)
    engine.add(spec("r", range(10), max_tokens=1))
    Transcript().run(engine)
    tokens, blocks = engine.kv.locate(ROOT, [*range(10), 99])
    assert (tokens, len(blocks)) == (10, 3)
    keys, _ = engine.kv.read_kv(ROOT, [*range(10), 99], 0)
    assert keys.shape == (10, 1, 1)
    assert engine.kv.locate(ROOT, [9]) == (0, [])
    with pytest.raises(IndexError):
        engine.kv.read_kv(ROOT, [1], 1)


# ---------------------------------------------------------------------- ends


def test_stop_token_is_neither_emitted_nor_counted() -> None:
    expected = expected_tokens([1, 2, 3], GREEDY8)
    engine = make_engine(eos_ids=(expected[4],))
    engine.add(spec("eos", [1, 2, 3]))
    engine.add(spec("ignored", [1, 2, 3], sampling=Sampling(8, temperature=0.0, ignore_eos=True)))
    engine.add(spec("own", [1, 2, 3], sampling=Sampling(8, temperature=0.0, stop_ids=(expected[2],))))
    transcript = Transcript().run(engine)
    assert transcript.tokens["eos", 0] == expected[:4]
    assert transcript.tokens["ignored", 0] == expected
    assert transcript.tokens["own", 0] == expected[:2]
    assert transcript.ends["own", 0] is FinishReason.STOP
    assert transcript.finished["eos", 0].output_tokens == 4


def test_stop_string_across_tokens_cuts_the_text() -> None:
    expected = expected_tokens([1, 2, 3], GREEDY8)
    stop = f"{str(expected[2])[-1]} {expected[3]} "
    engine = make_engine()
    engine.add(spec("r", [1, 2, 3], sampling=Sampling(8, temperature=0.0, stop=(stop,))))
    transcript = Transcript().run(engine)
    assert transcript.text["r", 0] == f"{expected[0]} {expected[1]} {str(expected[2])[:-1]}"
    assert transcript.tokens["r", 0] == expected[:4]
    assert transcript.ends["r", 0] is FinishReason.STOP


def test_held_text_is_flushed_with_the_last_token() -> None:
    expected = expected_tokens([1, 2, 3], GREEDY8)
    engine = make_engine(eos_ids=(expected[3],))
    engine.add(spec("r", [1, 2, 3], sampling=Sampling(8, temperature=0.0, stop=(f"{expected[2]} no",))))
    transcript = Transcript().run(engine)
    assert transcript.text["r", 0] == "".join(f"{token} " for token in expected[:3])
    assert transcript.tokens["r", 0] == expected[:3]


@pytest.mark.parametrize("state", ["waiting", "running", "paused"])
def test_cancel_ends_it_and_frees_its_blocks(state: str) -> None:
    engine, transcript = make_engine(slots=1), Transcript()
    if state == "waiting":
        engine.add(spec("other", [9]))
    engine.add(spec("r", range(10)))
    transcript.take(engine.step())
    if state == "paused":
        engine.pause("r", 0)
    engine.cancel("nobody", 0)
    engine.cancel("r", 7)
    engine.cancel("r", 0)
    engine.check_integrity()
    transcript.take(engine.step())
    assert isinstance(transcript.ends["r", 0], Cancelled)
    transcript.run(engine)
    assert engine.pool.used == 0


def test_paused_sequence_holds_no_blocks_and_goes_on_where_it_was() -> None:
    engine, transcript = make_engine(block_size=4), Transcript()
    engine.add(spec("r", range(10)))
    for _ in range(3):
        transcript.take(engine.step())
    fed = transcript.fed
    engine.pause("r", 0)
    engine.check_integrity()
    assert not engine.has_work
    assert engine.pool.used == 0
    engine.resume("r", 0)
    transcript.run(engine)
    assert transcript.tokens["r", 0] == expected_tokens(range(10), GREEDY8)
    assert transcript.fed == 17  # what was computed before the pause was found again
    assert fed < transcript.fed
    assert transcript.started["r", 0].cached_tokens == 0


@pytest.mark.parametrize("done", range(1, 8))
def test_later_attempt_goes_on_after_the_tokens_of_an_earlier_one(done: int) -> None:
    sampling = Sampling(8, temperature=1.0, seed=3)
    expected = expected_tokens([1, 2, 3], sampling)
    sent = "".join(f"{token} " for token in expected[:done])
    engine = make_engine()
    engine.add(
        spec("r", [1, 2, 3], attempt=1, sampling=sampling, output_ids=tuple(expected[:done]), text_sent=len(sent))
    )
    transcript = Transcript().run(engine)
    assert transcript.first_index["r", 1] == done
    assert transcript.tokens["r", 1] == expected[done:]
    assert sent + transcript.text["r", 1] == "".join(f"{token} " for token in expected)
    assert transcript.finished["r", 1].output_tokens == 8


def test_later_attempt_of_what_was_complete_finishes_at_once() -> None:
    expected = expected_tokens([1, 2, 3], GREEDY8)
    engine = make_engine()
    engine.add(spec("length", [1, 2, 3], output_ids=tuple(expected), text_sent=1000))
    stop = Sampling(8, temperature=0.0, stop=(f"{expected[1]} ",))
    engine.add(spec("stop", [1, 2, 3], sampling=stop, output_ids=tuple(expected[:2]), text_sent=4))
    transcript = Transcript().run(engine)
    assert transcript.ends == {("length", 0): FinishReason.LENGTH, ("stop", 0): FinishReason.STOP}
    assert transcript.fed == 0


def test_choices_of_one_seed_differ() -> None:
    sampling = Sampling(8, temperature=1.0, seed=3)
    engine = make_engine()
    for choice in range(2):
        engine.add(spec(f"c{choice}", [1, 2, 3], sampling=sampling, choice=choice))
    transcript = Transcript().run(engine)
    for choice in range(2):
        assert transcript.tokens[f"c{choice}", 0] == expected_tokens([1, 2, 3], sampling, choice=choice)
    assert transcript.tokens["c0", 0] != transcript.tokens["c1", 0]


# ---------------------------------------------------------------------- contained


class BrokenText(IdDetokenizer):
    """Fails on the third token of prompts that begin with 13."""

    def stream(self, prompt_ids: Sequence[int]) -> IdStream:
        return _BrokenStream() if prompt_ids[0] == 13 else IdStream()


class _BrokenStream(IdStream):
    pushed = 0

    def push(self, token: int) -> str:
        self.pushed += 1
        if self.pushed == 3:
            raise OverflowError("no such token")
        return super().push(token)


def test_text_that_cannot_be_made_fails_its_request_alone() -> None:
    engine = make_engine(detokenizer=BrokenText())
    engine.add(spec("bad", [13, 1]))
    engine.add(spec("good", [14, 1]))
    transcript = Transcript().run(engine)
    assert isinstance(transcript.ends["bad", 0], EngineFailure)
    assert transcript.tokens["good", 0] == expected_tokens([14, 1], GREEDY8)
    assert engine.pool.used == 0


class BrokenEnd(IdDetokenizer):
    def stream(self, prompt_ids: Sequence[int]) -> IdStream:
        stream = IdStream()
        stream.pending = True
        stream.flush = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
        return stream


def test_text_that_cannot_be_ended_or_rebuilt_fails_its_request_alone() -> None:
    engine = make_engine(detokenizer=BrokenEnd())
    engine.add(spec("end", [1]))
    assert isinstance(Transcript().run(engine).ends["end", 0], EngineFailure)
    engine = make_engine(detokenizer=BrokenText())
    with pytest.raises(EngineFailure, match="could not be made text"):
        engine.add(spec("rebuilt", [13], output_ids=(1, 2, 3)))
    assert not engine.has_work
    engine.check_integrity()


class BrokenRunner(FakeRunner):
    """Cannot draw for sequences that begin with 13, and has memory for `most` tokens a step."""

    most = 1_000

    def run(self, slices: Sequence[Slice]) -> list[Drawn]:
        if sum(len(part.ids) for part in slices) > self.most:
            raise OutOfMemory("the step is too large")
        drawn = super().run(slices)
        first = [self.slots[part.blocks[0] * self.block_size] for part in slices]
        bad = FakeRunner(num_blocks=1, block_size=1)
        bad.run([Slice([13], 0, [0], None)])
        return [EngineFailure("not finite") if v == bad.slots[0] else d for v, d in zip(first, drawn, strict=True)]


def test_draw_that_fails_ends_its_request_alone_and_caches_nothing_of_the_step() -> None:
    engine = make_engine(runner=BrokenRunner(num_blocks=32, block_size=4, vocab_size=1000, context_length=64))
    engine.add(spec("bad", [13, *range(9)]))
    engine.add(spec("good", [14, *range(9)]))
    transcript = Transcript().run(engine)
    assert isinstance(transcript.ends["bad", 0], EngineFailure)
    assert transcript.ends["good", 0] is FinishReason.LENGTH
    assert engine.kv.locate(ROOT, [13, *range(9)])[0] == 0


def test_a_step_out_of_memory_is_computed_in_parts() -> None:
    runner = BrokenRunner(num_blocks=32, block_size=4, vocab_size=1000, context_length=64)
    runner.most = 10
    engine = make_engine(runner=runner, token_budget=64)
    engine.add(spec("small", [1, 2, 3]))
    engine.add(spec("large", range(20)))
    transcript = Transcript()
    transcript.take(engine.step())  # nobody even loses the step
    for name, prompt in (("small", [1, 2, 3]), ("large", range(20))):
        assert transcript.tokens[name, 0] == expected_tokens(prompt, GREEDY8)[:1]
    engine.check_integrity()
    assert engine.scheduler.pacer.budget.tokens == 16, "the next ones are smaller"
    transcript.run(engine)
    for name, prompt in (("small", [1, 2, 3]), ("large", range(20))):
        assert transcript.tokens[name, 0] == expected_tokens(prompt, GREEDY8)
    assert engine.pool.used == 0


def test_a_token_that_does_not_fit_alone_fails_its_request_and_no_other() -> None:
    class Far(FakeRunner):
        """Has no memory for what attends to more than 20 tokens."""

        def run(self, slices: Sequence[Slice]) -> list[Drawn]:
            if any(part.end > 20 for part in slices):
                raise OutOfMemory("the scores are too large")
            return super().run(slices)

    engine = make_engine(runner=Far(num_blocks=64, block_size=4, vocab_size=1000, context_length=64), token_budget=64)
    engine.add(spec("fed most", range(18), max_tokens=2))
    engine.add(spec("far", [7, 8, 9], max_tokens=40))
    engine.add(spec("small", [1, 2, 3]))
    transcript = Transcript().run(engine)
    assert isinstance(transcript.ends["far", 0], OutOfMemory)
    assert transcript.tokens["far", 0] == expected_tokens([7, 8, 9], Sampling(40, temperature=0.0))[:18]
    for name in ("fed most", "small"):
        assert transcript.ends[name, 0] is FinishReason.LENGTH
    assert engine.pool.used == 0


def test_step_out_of_memory_copies_no_block_twice() -> None:
    """A copy's source may have been overwritten by the time the rest is run again."""
    runner = BrokenRunner(num_blocks=32, block_size=4, vocab_size=1000, context_length=64)
    engine = make_engine(runner=runner, token_budget=64)
    engine.add(spec("first", range(10), max_tokens=1))
    Transcript().run(engine)
    copies, copy_blocks = [], runner.copy_blocks
    runner.copy_blocks = lambda pairs: (copies.extend(pairs), copy_blocks(pairs))[1]  # type: ignore[method-assign, assignment]
    runner.most = 10
    engine.add(spec("large", range(100, 120)))
    engine.add(spec("small", [*range(10), 55]))
    transcript = Transcript().run(engine)
    assert len(copies) == 1
    assert transcript.tokens["large", 0] == expected_tokens(range(100, 120), GREEDY8)
    assert transcript.tokens["small", 0] == expected_tokens([*range(10), 55], GREEDY8)


def test_decodes_that_do_not_fit_together_are_computed_in_parts() -> None:
    runner = BrokenRunner(num_blocks=32, block_size=4, vocab_size=1000, context_length=64)
    engine, transcript = make_engine(runner=runner), Transcript()
    prompts = {"a": [1, 2], "long": [3, 4, 5, 6, 7], "b": [8, 9]}
    for name, prompt in prompts.items():
        engine.add(spec(name, prompt))
    transcript.take(engine.step())
    runner.most = 2
    transcript.run(engine)
    for name, prompt in prompts.items():
        assert transcript.tokens[name, 0] == expected_tokens(prompt, GREEDY8)
    assert engine.pool.used == 0


def test_nothing_fits_and_everything_fails_but_the_engine_goes_on() -> None:
    runner = BrokenRunner(num_blocks=32, block_size=4, vocab_size=1000, context_length=64)
    engine, transcript = make_engine(runner=runner), Transcript()
    runner.most = 0
    for at in range(3):
        engine.add(spec(f"r{at}", [1, at]))
    transcript.take(engine.step())
    assert [type(end) for end in transcript.ends.values()] == [OutOfMemory] * 3
    runner.most = 1_000
    engine.add(spec("later", [1, 2]))
    assert transcript.run(engine).ends["later", 0] is FinishReason.LENGTH


# ---------------------------------------------------------------------- measured


def test_long_prompts_are_cheap_to_keep_books_of() -> None:
    """30,561 tokens: hashing, chunking, matching and releasing take milliseconds, not minutes."""
    engine = make_engine(blocks=2048, block_size=16, token_budget=512, context_length=32_768)
    prompt = [at % 997 for at in range(30_561)]
    for cached in (0, 30_560):
        began = time.perf_counter()
        engine.add(spec("long", prompt, max_tokens=1))
        transcript = Transcript()
        while engine.has_work:
            transcript.take(engine.step())
        assert time.perf_counter() - began < 2.0
        assert transcript.started["long", 0].cached_tokens == cached
    engine.check_integrity()


def test_load_counts() -> None:
    clock = Clock()
    engine = make_engine(slots=1, block_size=4, blocks=16, token_budget=8, clock=clock)
    engine.add(spec("a", range(10)))
    engine.add(spec("b", range(5)))
    transcript = Transcript()
    transcript.take(engine.step())
    load = engine.load()
    assert (load.waiting, load.running, load.slots) == (1, 1, 1)
    assert (load.blocks_used, load.blocks_cached, load.blocks_total) == (3, 0, 16)
    assert load.queued_prefill_tokens == 2 + 1  # a is done with the block that b begins with
    transcript.run(engine)
    load = engine.load()
    assert (load.waiting, load.running, load.blocks_used, load.queued_prefill_tokens) == (0, 0, 0, 0)
    assert load.prompt_tokens_total == 15
    assert load.hit_tokens_total == transcript.started["b", 0].cached_tokens == 4
    assert load.fed_tokens_total == transcript.fed == (10 + 7) + (1 + 7)
    assert load.generated_tokens_total == 16


def test_rates_come_from_steps() -> None:
    clock = Clock()

    class Slow(FakeRunner):
        def run(self, slices: Sequence[Slice]) -> list[Drawn]:
            clock.now += 0.01 * sum(len(part.ids) for part in slices)
            return super().run(slices)

    engine = make_engine(
        runner=Slow(num_blocks=64, block_size=4, vocab_size=1000, context_length=64), clock=clock, token_budget=64
    )
    assert engine.rates().prefill_tokens_per_s == engine.rates().decode_steps_per_s == 0
    engine.add(spec("a", range(20)))
    engine.add(spec("b", range(20, 40)))
    Transcript().run(engine)
    rates = engine.rates()
    assert rates.prefill_tokens_per_s == pytest.approx(100)
    assert rates.decode_steps_per_s == pytest.approx(50)
    assert rates.decode_tokens_per_s == pytest.approx(100)
    assert rates.step_s == pytest.approx(0.4), "readers are told of the longest step, the prefill"
