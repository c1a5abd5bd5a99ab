"""The compiled kernels and the tensor operations draw the same tokens bit for bit, and draw what transformers would."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from engine_rig import relaxed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvcpu.vector.compiled import entry
from kvproto.messages import Sampling
from kvsampling import cpu, portable
from kvsampling.draw import Draw
from kvsampling.portable import DrawSettings, weight_bits
from kvsampling.sampler import sample, warm_up
from tests.support.devices import DEVICES

LIMITS = [
    {},
    {"top_k": 5},
    {"top_k": 300},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.4, "top_p": 0.9, "top_k": 50},
    {"temperature": 2.5, "top_p": 0.7, "min_p": 0.1},
]


def draws(count: int, **fields: object) -> list[Draw]:
    return [Draw(Sampling(1, seed=11, **fields), 0, at) for at in range(count)]  # type: ignore[arg-type]


def random_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("device", DEVICES)
@settings(relaxed, max_examples=150)
@given(
    st.sampled_from([2, 11, 255, 256, 257, 1500, 5000]),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    st.sampled_from(["as they are", "rounded", "masked", "ascending", "far apart"]),
    st.lists(
        st.builds(
            Sampling,
            st.just(1),
            temperature=st.sampled_from([1e-300, 0.2, 0.8, 1.0, 100.0]),
            top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.9999, 1.0]),
            top_k=st.sampled_from([0, 2, 7, 256, 257, 1499, 4000]),
            min_p=st.sampled_from([0.0, 1e-12, 0.05, 0.999]),
            seed=st.integers(0, 2**64 - 1),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_both_ways_draw_the_same(
    device: str, vocab: int, seed: int, spread: float, form: str, asked: list[Sampling]
) -> None:
    logits = random_logits(len(asked), vocab, seed, spread)
    if form == "rounded":  # many equal ones
        logits = logits.bfloat16().float()
    if form == "masked":
        logits[:, 1::2] = -math.inf
    if form == "ascending":
        logits = logits.sort(dim=-1).values
    if form == "far apart":
        logits = logits.sign() * torch.exp2(logits.abs().clamp(max=100.0))
    wanted = DrawSettings.of([Draw(one, 0, at) for at, one in enumerate(asked)], vocab)
    there = logits.to(device)
    assert cpu.draw(logits, wanted) == portable.draw(there, wanted)
    assert cpu.greedy(logits) == portable.greedy(there)
    count = min(vocab, 40)
    for one, other in zip(cpu.masses_and_best(logits, count), portable.masses_and_best(there, count), strict=True):
        assert np.array_equal(one, other)


def test_weights_are_probabilities_to_the_precision_of_their_bits() -> None:
    logits = random_logits(4, 50_257, seed=1)
    weights = portable.kept_weights(logits, DrawSettings.of(draws(4, temperature=0.7), 50_257))
    exact = ((logits.double() - logits.double().amax(dim=-1, keepdim=True)) / 0.7).exp()
    assert (weights.double() * 2.0 ** -weight_bits(50_257) - exact).abs().max() < 2.0 ** (1 - weight_bits(50_257))


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """transformers' own, in the documented order."""
    chosen: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    chosen.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chosen.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chosen.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chosen.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(chosen)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_what_is_kept_is_what_transformers_keeps(limits: dict[str, float]) -> None:
    logits = random_logits(20, 1000, seed=2)
    kept = portable.kept_weights(logits, DrawSettings.of(draws(20, **limits), 1000)) > 0
    expected = warpers(Sampling(1, **limits))(torch.zeros(20, 0, dtype=torch.int64), logits).isfinite()  # type: ignore[arg-type]
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("limits", [*LIMITS, {"repetition_penalty": 1.7, "top_p": 0.9}], ids=str)
def test_frequencies_follow_the_probabilities_that_transformers_computes(limits: dict[str, float]) -> None:
    count, prompt = 8000, (0, 5, 5, 17)
    logits = random_logits(1, 40, seed=3, spread=1.5)
    sampling = Sampling(1, seed=5, **limits)  # type: ignore[arg-type]
    expected = warpers(sampling)(torch.tensor([prompt]), logits).double().softmax(dim=-1)[0].tolist()
    drawn = Counter(sample(logits.expand(count, -1), [Draw(sampling, 0, at, prompt) for at in range(count)]))
    assert not [token for token in drawn if not expected[token]]
    possible = [token for token, probability in enumerate(expected) if probability]
    chi_square = sum((drawn[token] - count * expected[token]) ** 2 / (count * expected[token]) for token in possible)
    freedom = len(possible) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 1


def test_after_the_warm_up_nothing_is_left_to_compile() -> None:
    warm_up(torch.device("cpu"))
    compiled = entry.cache_info().misses
    for logits in (random_logits(5, 300, seed=1), random_logits(5, 300, seed=1).bfloat16()[1:4]):
        for limits in LIMITS:
            sample(logits, draws(len(logits), logprobs=3, presence_penalty=1.0, **limits))
            sample(logits[::2], draws(len(logits[::2]), **limits))
    assert entry.cache_info().misses == compiled


def test_threads_change_nothing() -> None:
    logits, asked = random_logits(30, 1000, seed=4), draws(30, top_p=0.9, logprobs=2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = sample(logits, asked)
        torch.set_num_threads(2)
        assert sample(logits, asked) == alone
    finally:
        torch.set_num_threads(threads)


STARVED = """
import resource
import torch
from kvproto.errors import OutOfMemory
from kvproto.messages import Sampling
from kvsampling.sampler import sample, warm_up
from kvsampling.draw import Draw

torch.set_num_threads(1)
warm_up(torch.device("cpu"))
draw = Draw(Sampling(1, seed=1, top_k=5), 0, 0)
assert isinstance(sample(torch.zeros(1, 1000), [draw])[0], int)
logits = torch.zeros(1, 60_000_000)
taken = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (taken + (32 << 20), resource.RLIM_INFINITY))
(found,) = sample(logits, [draw])
assert isinstance(found, OutOfMemory), found
assert isinstance(sample(torch.zeros(1, 1000), [draw])[0], int)
print("survived")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own memory")
def test_compiled_draws_that_cannot_allocate_fail_their_request_only() -> None:
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "survived\n", done.stderr
