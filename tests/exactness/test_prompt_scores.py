"""Scores of prompts equal those of transformers' forward pass, however a prompt is cut, preempted and mixed with
others; and they take little memory."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_configs import VOCAB
from tiny_models import ROOT, TOLERANCE, make_model, plain_logits

from kvcpu.attention.backend import CpuBackend
from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model import runner as runner_module
from kvfleet.worker.model.assembly import trial_logits
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.fused.fuse import optimise
from kvfleet.worker.model.loader import adopt_model
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.port.outputs import SequenceFailed
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.scheduler import Scheduler
from kvproto.errors import EngineFailure
from kvproto.messages import PromptScores, Sampling, TokenLogprobs, Tokens
from tests.support.id_detokenizer import IdDetokenizer

ALTERNATIVES = 5


def engine_of(model: Any, backend: AttentionBackend, *, blocks: int = 128, budget: int = 512) -> Engine:
    loaded = adopt_model(copy.deepcopy(model))
    if backend.name == "cpu":
        optimise(loaded.model, torch.get_num_threads(), lambda: trial_logits(loaded, 16))
    pool = BlockPool(blocks, 16)
    runner = TorchRunner(loaded, backend, blocks, 16)
    return Engine(runner, pool, Scheduler(pool, token_budget=budget, slots=8), IdDetokenizer())


def spec_of(name: str, prompt: list[int], max_tokens: int = 4, *, scored: int | None = 0) -> SequenceSpec:
    asked = Sampling(max_tokens, temperature=0.0, prompt_logprobs=None if scored is None else ALTERNATIVES)
    return SequenceSpec(name, 0, tuple(prompt), asked, ROOT, scored=scored)


def run(engine: Engine, *specs: SequenceSpec) -> dict[str, list[TokenLogprobs]]:
    for spec in specs:
        engine.add(spec)
    found: dict[str, list[TokenLogprobs]] = {spec.request: [] for spec in specs}
    while engine.has_work:
        outputs = engine.step().outputs
        engine.check_integrity()
        for output in outputs:
            assert not isinstance(output, SequenceFailed), output
            if isinstance(output, PromptScores):
                found[output.request] += output.logprobs
    return found


def assert_scores(model: Any, prompt: list[int], scores: list[TokenLogprobs], skip: int = 0) -> None:
    expected = plain_logits(model, prompt).log_softmax(-1)[skip : len(prompt) - 1]
    assert len(scores) == len(expected)
    best = expected.topk(ALTERNATIVES, dim=-1).values
    for row, top, token, one in zip(expected, best, prompt[skip + 1 :], scores, strict=True):
        assert one.logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
        assert torch.tensor(one.top_logprobs) == pytest.approx(top, abs=TOLERANCE)
        assert row[list(one.top_ids)] == pytest.approx(top, abs=TOLERANCE)
        close = (row > row[token] - TOLERANCE).sum(), (row > row[token] + TOLERANCE).sum()
        assert close[1] < one.rank <= close[0]


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(count)]


def chunked_beside_others_and_again(model: Any, backend: AttentionBackend) -> None:
    chance = random.Random(1)
    engine = engine_of(model, backend, budget=37)
    long, short, plain = tokens(chance, 120), tokens(chance, 9), tokens(chance, 40)
    found = run(engine, spec_of("long", long), spec_of("plain", plain, 20, scored=None), spec_of("short", short, 0))
    assert_scores(model, long, found["long"])
    assert_scores(model, short, found["short"])
    assert found["plain"] == []
    again = run(engine, spec_of("cached", long), spec_of("rest", long, scored=77))
    assert_scores(model, long, again["cached"])
    assert_scores(model, long, again["rest"], 76)


def test_chunked_beside_others_and_again(representative: Any, backend: AttentionBackend) -> None:
    chunked_beside_others_and_again(representative, backend)


def test_every_model(model: Any) -> None:
    chunked_beside_others_and_again(model, CpuBackend())


def test_preempted_in_the_midst_of_prompts(representative: Any, backend: AttentionBackend) -> None:
    chance = random.Random(2)
    engine = engine_of(representative, backend, blocks=16, budget=24)
    prompts = {f"r{at}": tokens(chance, 60 + at) for at in range(8)}
    found = run(engine, *(spec_of(name, prompt, 30) for name, prompt in prompts.items()))
    assert engine.load().preemptions_total > 0
    for name, prompt in prompts.items():
        assert_scores(representative, prompt, found[name])


def test_the_layers_run_once_and_few_rows_have_logits_at_once(backend: AttentionBackend) -> None:
    model, prompt = make_model("llama"), tokens(random.Random(3), 100)
    engine = engine_of(model, backend)
    runner = engine.runner
    assert isinstance(runner, TorchRunner)
    passes: list[int] = []
    heads: list[int] = []
    runner._model.base_model.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    runner._model.lm_head.register_forward_hook(lambda _, __, out: heads.append(out.shape[1]))
    with patch.object(runner_module, "SCORED_BYTES", 10 * 4 * VOCAB):
        found = run(engine, spec_of("r", prompt, 1))
    assert_scores(model, prompt, found["r"])
    assert len(passes) == 1
    assert heads == [1, *[10] * 9, 9]
    run(engine, spec_of("next", tokens(random.Random(4), 30), 2, scored=None))
    assert len(passes) == 3, "the layers' output is kept within one step alone"


def test_a_model_that_does_not_tell_its_layers_from_its_head(backend: AttentionBackend) -> None:
    model, prompt = make_model("llama"), tokens(random.Random(5), 50)
    engine = engine_of(model, backend)
    runner = engine.runner
    assert isinstance(runner, TorchRunner)
    with patch.object(type(runner._model), "base_model_prefix", "none"):
        assert runner._model.base_model is runner._model
        found = run(engine, spec_of("r", prompt, 1))
    assert_scores(model, prompt, found["r"])


def test_a_step_that_does_not_fit_is_scored_in_parts(backend: AttentionBackend) -> None:
    model, prompt = make_model("llama"), tokens(random.Random(6), 100)
    engine = engine_of(model, backend)
    runner = engine.runner
    real = runner.run

    def small(slices: Any) -> Any:
        if sum(len(part.ids) for part in slices) > 30:
            raise runner_module.OutOfMemory("no room")
        return real(slices)

    with patch.object(runner, "run", small):
        found = run(engine, spec_of("r", prompt, 3))
    assert_scores(model, prompt, found["r"])


def test_logits_that_are_not_finite_end_that_request_alone(backend: AttentionBackend) -> None:
    model = make_model("llama")
    engine = engine_of(model, backend)
    chance = random.Random(7)
    sick, well = tokens(chance, 40), tokens(chance, 40)
    sick[20] = 0
    well = [token or 1 for token in well]
    runner = engine.runner
    assert isinstance(runner, TorchRunner)
    with torch.no_grad():
        runner._model.get_input_embeddings().weight[0] = float("nan")
    outputs = []
    for spec in (spec_of("sick", sick), spec_of("well", well)):
        engine.add(spec)
    while engine.has_work:
        outputs += engine.step().outputs
    (failed,) = (one for one in outputs if isinstance(one, SequenceFailed))
    assert failed.request == "sick"
    assert isinstance(failed.error, EngineFailure)
    assert sum(len(one.ids) for one in outputs if isinstance(one, Tokens) and one.request == "well") == 4
