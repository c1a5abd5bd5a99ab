"""What a request may ask of its draws: log probabilities of them, and biases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rigs import EngineRig, Stream, greedy, sampled

from kvproto.messages import Sampling

NEAR = 1e-3  # a log probability may differ by so much between two ways to compute it


def check(stream: Stream, alternatives: int) -> None:
    assert len(stream.logprobs) == len(stream.ids)
    for token, told in zip(stream.ids, stream.logprobs, strict=True):
        assert told.logprob <= 0
        assert len(told.top_ids) == len(told.top_logprobs) == len(set(told.top_ids)) == alternatives
        assert list(told.top_logprobs) == sorted(told.top_logprobs, reverse=True)
        if token in told.top_ids:
            assert told.logprob == pytest.approx(told.top_logprobs[told.top_ids.index(token)], abs=NEAR)
        elif alternatives:
            assert told.logprob <= told.top_logprobs[-1] + NEAR


@pytest.mark.parametrize("alternatives", [0, 1, 5])
@pytest.mark.parametrize("sampling", [greedy(8), sampled(8)], ids=["greedy", "sampled"])
async def test_each_token_has_its_log_probability_and_the_best_ones(
    rig: EngineRig, sampling: Sampling, alternatives: int
) -> None:
    """They come with the tokens that are drawn without them."""
    prompt = rig.prompt(30)
    plain = await rig.run(rig.spec("plain", prompt, sampling))
    told = await rig.run(rig.spec("told", prompt, replace(sampling, logprobs=alternatives)))
    assert plain.logprobs == ()
    assert told.result == plain.result
    check(told, alternatives)
    if alternatives and not sampling.temperature:
        assert [one.top_ids[0] for one in told.logprobs] == list(told.ids)
        assert [one.logprob for one in told.logprobs] == pytest.approx([one.top_logprobs[0] for one in told.logprobs])


async def test_log_probabilities_come_with_tokens_that_are_held_back(rig: EngineRig) -> None:
    prompt = rig.prompt(30)
    plain = await rig.run(rig.spec("plain", prompt, sampled(12, logprobs=2)))
    begins = "".join(plain.pieces[:6])[-3:] + " never to be seen"
    held = await rig.run(rig.spec("held", prompt, sampled(12, logprobs=2, stop=(begins,))))
    assert held.result == plain.result
    check(held, 2)
    assert [one.logprob for one in held.logprobs] == pytest.approx([one.logprob for one in plain.logprobs], abs=NEAR)


async def test_a_bias_forces_or_forbids_and_is_not_in_the_log_probability(rig: EngineRig) -> None:
    prompt, forced = rig.prompt(30), rig.vocab_size - 5
    plain, drawn, without = await rig.run_all(
        rig.spec("plain", prompt, greedy(4, logprobs=1)),
        rig.spec("forced", prompt, greedy(4, logit_bias={forced: 100.0}, logprobs=1)),
        rig.spec("forbidden", prompt, greedy(4, logit_bias=dict.fromkeys(range(0, rig.vocab_size, 2), -100.0))),
    )
    assert drawn.ids == (forced,) * 4
    assert drawn.logprobs[0].top_ids == plain.logprobs[0].top_ids
    assert drawn.logprobs[0].logprob < drawn.logprobs[0].top_logprobs[0]
    assert all(token % 2 for token in without.ids)
