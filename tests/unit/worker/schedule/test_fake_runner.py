"""The fake runner: deterministic, and honest about what is in its blocks."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import numpy as np
import pytest
from engine_rig import Transcript, expected_tokens, make_engine, spec

from kvfleet.worker.model.fake import FakePace, FakeRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.messages import Sampling
from kvsampling.draw import Draw, Scored

GREEDY = Draw(Sampling(1, temperature=0.0), 0, 0)


def token_of(runner: FakeRunner, ids: list[int], blocks: list[int], start: int = 0) -> int:
    (token,) = runner.run([Slice(ids[start:], start, blocks, GREEDY)])
    assert isinstance(token, int)
    return token


def test_chunks_and_block_placement_do_not_matter() -> None:
    ids = list(range(40))
    runner = FakeRunner(num_blocks=16, block_size=4)
    whole = token_of(runner, ids, list(range(10)))
    scattered = [15, 3, 11, 7, 2, 14, 0, 9, 5, 1]
    runner.run([Slice(ids[:13], 0, scattered, None)])
    assert token_of(runner, ids, scattered, start=13) == whole


@pytest.mark.parametrize("block", range(10))
def test_every_corrupted_block_changes_the_token(block: int) -> None:
    ids = list(range(38))
    runner = FakeRunner(num_blocks=16, block_size=4)
    blocks = list(range(10))
    whole = token_of(runner, ids, blocks)
    runner.copy_blocks([(15, block)])
    assert token_of(runner, ids, blocks, start=37) != whole


def test_position_and_sampling_count() -> None:
    runner = FakeRunner(num_blocks=16, block_size=4)
    assert token_of(runner, [1, 2, 3], [0]) != token_of(runner, [2, 1, 3], [0])
    sampling = Sampling(1, temperature=1.0, seed=5)
    tokens = {
        runner.run([Slice([1, 2, 3], 0, [0], draw)])[0]
        for draw in (Draw(sampling, 0, 0), Draw(sampling, 0, 1), Draw(sampling, 1, 0), GREEDY)
    }
    assert len(tokens) == 4


def test_through_the_engine_it_equals_computing_alone() -> None:
    engine, transcript = make_engine(token_budget=7), Transcript()
    prompts = {f"r{at}": [5, 5, 5, 5, 5, at] for at in range(6)}
    for name, prompt in prompts.items():
        engine.add(spec(name, prompt))
    transcript.run(engine)
    for name, prompt in prompts.items():
        assert transcript.tokens[name, 0] == expected_tokens(prompt, Sampling(8, temperature=0.0))


def test_pace() -> None:
    slept: list[float] = []
    runner = FakeRunner(
        num_blocks=8,
        block_size=4,
        pace=FakePace(100.0, 1000.0, step_seconds=0.5, clock=lambda: 10.0 + sum(slept), sleep=slept.append),
    )
    runner.run([Slice([1, 2, 3], 0, [0], GREEDY), Slice([4], 0, [1], GREEDY)])
    assert sum(slept) == pytest.approx(0.5 + 0.003 + 0.01)


def test_read_kv_shape() -> None:
    runner = FakeRunner(num_blocks=8, block_size=4)
    token_of(runner, [1, 2, 3, 4, 5], [6, 2])
    keys, values = runner.read_kv([6, 2], 5, 0)
    assert keys.shape == values.shape == (5, 1, 1)
    assert np.array_equal(keys, -values)


def test_is_cheap_at_batch_64() -> None:
    runner = FakeRunner(num_blocks=64 * 64, block_size=16)
    slices = [Slice([at], 1000, list(range(at * 64, at * 64 + 64)), GREEDY) for at in range(64)]
    runner.run(slices)
    best = min(_timed(runner, slices) for _ in range(20))
    assert best / 64 < 20e-6


def _timed(runner: FakeRunner, slices: list[Slice]) -> float:
    began = time.perf_counter()
    runner.run(slices)
    return time.perf_counter() - began


def test_engine_and_fake_import_neither_torch_nor_nats() -> None:
    code = (
        "import sys; import kvfleet.worker.engine.engine_thread, kvfleet.worker.model.fake; "
        "import kvfleet.worker.port.outputs; "
        "sys.exit(bool({'torch', 'transformers', 'nats', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def scored(runner: FakeRunner, sampling: Sampling, ids: list[int] = [1, 2, 3], choice: int = 0) -> Scored:  # noqa: B006
    (drawn,) = runner.run([Slice(ids, 0, [0], Draw(sampling, choice, 0))])
    assert isinstance(drawn, Scored)
    return drawn


def test_log_probabilities_are_a_distribution_and_the_models_own() -> None:
    runner = FakeRunner(num_blocks=4, block_size=4, vocab_size=50)
    greedy = Sampling(1, temperature=0.0, logprobs=50)
    best = scored(runner, greedy)
    assert len(set(best.logprobs.top_ids)) == 50
    assert sum(map(math.exp, best.logprobs.top_logprobs)) == pytest.approx(1.0)
    assert list(best.logprobs.top_logprobs) == sorted(best.logprobs.top_logprobs, reverse=True)
    assert best.logprobs.top_ids[0] == best.token
    known = dict(zip(best.logprobs.top_ids, best.logprobs.top_logprobs, strict=True))
    seen = set()
    for seed in range(20):
        for choice in range(2):
            drawn = scored(runner, Sampling(1, seed=seed, logprobs=3, logit_bias={7: 1.0}), choice=choice)
            assert drawn.logprobs.logprob == known[drawn.token], "whatever was drawn, and however"
            assert drawn.logprobs.top_ids == best.logprobs.top_ids[:3]
            seen.add(drawn.token)
    assert len(seen) > 5
    assert scored(runner, greedy, [1, 2, 4]).logprobs != best.logprobs, "they depend on what the blocks hold"
    assert scored(runner, Sampling(1, temperature=0.0, logprobs=0)).logprobs.top_ids == ()


def test_no_one_pays_for_log_probabilities_that_were_not_asked_for() -> None:
    assert isinstance(token_of(FakeRunner(num_blocks=4, block_size=4), [1, 2, 3], [0]), int)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_and_biases_count(temperature: float) -> None:
    runner = FakeRunner(num_blocks=4, block_size=4, vocab_size=50)

    def token(banned: tuple[int, ...] = (), bias: dict[int, float] | None = None) -> int:
        sampling = Sampling(1, temperature=temperature, seed=3, logit_bias=bias or {})
        (drawn,) = runner.run([Slice([1, 2, 3], 0, [0], Draw(sampling, 0, 0, banned=banned))])
        assert isinstance(drawn, int)
        return drawn

    free = token()
    assert token(banned=(free,)) == (free + 1) % 50
    assert token(bias={free: -100.0}) == (free + 1) % 50
    assert token(bias={(free + 20) % 50: 100.0}) == (free + 20) % 50
    assert token(bias={(free + 20) % 50: 100.0}, banned=((free + 20) % 50,)) == free
    assert token(bias={(free + 20) % 50: 0.1}) == free
