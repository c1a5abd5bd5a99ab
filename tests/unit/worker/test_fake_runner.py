"""The fake runner: deterministic, and honest about what is in its blocks."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from engine_rig import Transcript, expected_tokens, make_engine, spec

from kvproto.messages import Sampling
from services.worker.model.fake import FakeRunner
from services.worker.step_plan import Draw, Slice

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
        num_blocks=8, block_size=4, tokens_per_s=100.0, prefill_tokens_per_s=1000.0, step_seconds=0.5,
        clock=lambda: 10.0 + sum(slept), sleep=slept.append,
    )  # fmt: skip
    runner.run([Slice([1, 2, 3], 0, [0], GREEDY), Slice([4], 0, [1], GREEDY)])
    assert slept == [pytest.approx(0.5 + 0.003 + 0.01)]


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
        "import sys; import services.worker.engine_thread, services.worker.model.fake, services.worker.cache_events; "
        "sys.exit(bool({'torch', 'transformers', 'nats', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
