"""Beam search equals transformers' `generate(num_beams=...)`: the rules by themselves, and the engine that runs it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_configs import VOCAB
from tiny_models import ROOT, TOLERANCE, Rig, make_model, plain_logits

from kvfleet.worker.port.outputs import SequenceFailed
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvproto.messages import Beams, ChoiceFinished, EarlyStopping, FinishReason, Sampling, Tokens
from kvsampling.beam_search import BeamSearch
from kvsampling.candidates import find_candidates
from kvsampling.draw import Candidates, Draw

EARLY = {EarlyStopping.FALSE: False, EarlyStopping.TRUE: True, EarlyStopping.NEVER: "never"}


def prompt_of(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(count)]


def generated(
    model: Any, prompt: list[int], beams: Beams, max_tokens: int, eos: list[int], n: int, **changes: Any
) -> list[tuple[list[int], float]]:
    """What transformers finds: tokens up to a stop token, and the score."""
    found = model.generate(
        torch.tensor([prompt], device=model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=model.device),
        max_new_tokens=max_tokens,
        do_sample=False,
        num_beams=beams.width,
        num_return_sequences=n,
        length_penalty=beams.length_penalty,
        early_stopping=EARLY[beams.early_stopping],
        eos_token_id=eos or None,
        pad_token_id=VOCAB - 1,
        return_dict_in_generate=True,
        output_scores=True,
        **changes,
    )
    told = []
    for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = next((at for at, token in enumerate(row) if token in eos), len(row))
        told.append((row[:end], score))
    return told


def stop_tokens(model: Any, prompt: list[int], width: int) -> list[int]:
    """Two that a search meets on its way."""
    rows = generated(model, prompt, Beams(width), 8, [], width)
    return [rows[0][0][3], rows[-1][0][5]]


def run_alone(
    model: Any, prompt: list[int], search: BeamSearch, sampling: Sampling, stop_ids: list[int]
) -> list[tuple[list[int], float]]:
    """The algorithm on logits of plain forward passes over whole sequences."""
    while not search.over:
        found = []
        for beam in search.running:
            ids = [one.token for one in beam.path()]
            banned = tuple(stop_ids) if len(ids) < sampling.min_tokens else ()
            draw = Draw(sampling, 0, len(ids), prompt, ids, banned, candidates=search.candidates)
            (one,) = find_candidates(plain_logits(model, prompt + ids)[-1:].float(), [draw])
            assert isinstance(one, Candidates)
            found.append(one)
        search.take(found)
    return [([beam.token for beam in end.output], end.score) for end in search.finished]


def assert_same(ours: list[tuple[list[int], float]], theirs: list[tuple[list[int], float]]) -> None:
    assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
    assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], rel=4e-6, abs=1e-4)


@pytest.mark.parametrize("early", EarlyStopping)
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("width", [2, 4, 5])
def test_the_rules_are_those_of_transformers(width: int, penalty: float, early: EarlyStopping) -> None:
    model, beams = make_model("llama"), Beams(width, penalty, early)
    prompt = prompt_of(width, 12)
    for eos in ([], stop_tokens(model, prompt, width)):
        search = BeamSearch(beams, 10, frozenset(eos))
        ours = run_alone(model, prompt, search, Sampling(10, beams=beams), eos)
        assert_same(ours, generated(model, prompt, beams, 10, eos, width))
        if not eos:
            assert {end.reason for end in search.finished} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("sampling", "changes"),
    [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"min_tokens": 9}, {"min_new_tokens": 9}),
        ({"logit_bias": {5: 4.0, 17: -3.0}}, {"sequence_bias": [[[5], 4.0], [[17], -3.0]]}),
    ],
)
def test_changes_are_of_log_probabilities(sampling: dict[str, Any], changes: dict[str, Any]) -> None:
    model, beams, prompt = make_model("llama"), Beams(4), prompt_of(11, 9)
    eos = stop_tokens(model, prompt, 4)
    asked = Sampling(10, beams=beams, **sampling)
    ours = run_alone(model, prompt, BeamSearch(beams, 10, frozenset(eos)), asked, eos)
    theirs = generated(model, prompt, beams, 10, eos, 4, **changes)
    assert_same(ours, theirs)
    assert ours != run_alone(model, prompt, BeamSearch(beams, 10, frozenset(eos)), Sampling(10, beams=beams), eos)


def ask(rig: Rig, name: str, prompt: list[int], max_tokens: int, beams: Beams, n: int, **sampling: Any) -> None:
    asked = Sampling(max_tokens, n=n, beams=beams, **sampling)
    for choice in range(n):
        rig.engine.add(SequenceSpec(name, 0, tuple(prompt), asked, ROOT, choice=choice))


def run(rig: Rig) -> dict[str, list[list[int]]]:
    """The tokens of each request's choices."""
    found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    ended = set()
    while rig.engine.has_work:
        for output in rig.engine.step().outputs:
            assert not isinstance(output, SequenceFailed), output.error
            if isinstance(output, Tokens):
                found[output.request][output.choice] += output.ids
            elif isinstance(output, ChoiceFinished):
                assert len(found[output.request][output.choice]) == output.output_tokens
                ended.add((output.request, output.choice))
        rig.engine.check_integrity()
    assert ended == {(name, choice) for name, choices in found.items() for choice in choices}
    assert rig.pool.used == 0
    return {name: [choices[at] for at in sorted(choices)] for name, choices in found.items()}


@pytest.mark.parametrize("early", EarlyStopping)
@pytest.mark.parametrize(("width", "n", "penalty"), [(2, 1, 1.0), (4, 4, 0.6), (5, 3, 2.0), (5, 5, -1.0)])
def test_the_engine_finds_what_generate_finds(
    make_rig: Callable[..., Rig], width: int, n: int, penalty: float, early: EarlyStopping
) -> None:
    """Cold and warm, with and without stop tokens, blocks smaller than what is generated."""
    model, beams = make_model("llama"), Beams(width, penalty, early)
    rig = make_rig(model, block_size=4, blocks=200, budget=9)
    for seed, length in enumerate((1, 12, 23)):
        prompt = prompt_of(seed, length)
        for eos in ([], stop_tokens(model, prompt, width)):
            expected = [ids for ids, _ in generated(model, prompt, beams, 11, eos, n)]
            for name in ("cold", "warm"):
                ask(rig, name, prompt, 11, beams, n, stop_ids=tuple(eos), ignore_eos=True)
                assert run(rig) == {name: expected}


def test_the_next_turn_reuses_the_answer(make_rig: Callable[..., Rig]) -> None:
    """What the best beam left, exact as if it had been computed for this."""
    model, beams, prompt = make_model("llama"), Beams(4), prompt_of(11, 9)
    rig = make_rig(model, block_size=4)
    ask(rig, "r", prompt, 21, beams, 1)
    (best,) = run(rig)["r"]
    rig.runner.noted.clear()
    turn = rig.add("turn", [*prompt, *best, 5, 6, 7], 12)
    rig.run()
    assert turn.cached == 28
    assert rig.differences()["turn"] < TOLERANCE
    rig.check_greedy()


def test_each_beam_has_penalties_of_its_own(make_rig: Callable[..., Rig]) -> None:
    model, beams, prompt = make_model("llama"), Beams(4), prompt_of(11, 9)
    eos = stop_tokens(model, prompt, 4)
    changed = {"repetition_penalty": 1.7, "min_new_tokens": 6}
    expected = [ids for ids, _ in generated(model, prompt, beams, 14, eos, 4, **changed)]
    rig = make_rig(model, block_size=4)
    sampling = {"repetition_penalty": 1.7, "min_tokens": 6, "stop_ids": tuple(eos), "ignore_eos": True}
    ask(rig, "r", prompt, 14, beams, 4, **sampling)
    assert run(rig) == {"r": expected}
    assert expected != [ids for ids, _ in generated(model, prompt, beams, 14, eos, 4)]


def test_every_representative(representative: Any, make_rig: Callable[..., Rig]) -> None:
    """Windows, experts and positions that are learnt."""
    beams, prompt = Beams(4), prompt_of(5, 30)
    expected = [ids for ids, _ in generated(representative, prompt, beams, 24, [], 4)]
    rig = make_rig(representative, block_size=8)
    ask(rig, "r", prompt, 24, beams, 4)
    assert run(rig) == {"r": expected}


def test_company_chunks_and_preemption_change_nothing(make_rig: Callable[..., Rig]) -> None:
    model, beams = make_model("llama"), Beams(3)
    rig = make_rig(model, block_size=4, blocks=36, budget=10, slots=10)
    expected = {}
    for at in range(6):
        prompt = prompt_of(at % 4, 8 + 3 * at)
        if at % 3 == 2:
            rig.engine.add(SequenceSpec(f"r{at}", 0, tuple(prompt), Sampling(40, temperature=0.0), ROOT))
            ids = torch.tensor([prompt], device=model.device)
            plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False,
                                   eos_token_id=None, pad_token_id=0)  # fmt: skip
            expected[f"r{at}"] = [plain[0, len(prompt) :].tolist()]
            continue
        ask(rig, f"r{at}", prompt, 22, beams, 2)
        expected[f"r{at}"] = [ids for ids, _ in generated(model, prompt, beams, 22, [], 2)]
    assert run(rig) == expected
    assert rig.scheduler.preemptions > 0
