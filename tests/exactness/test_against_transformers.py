"""All logits equal transformers', whatever the engine reuses, chunks, preempts or evicts on the way."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_configs import CONTEXT, REPRESENTATIVE, VOCAB
from tiny_models import TOLERANCE, Rig, make_model, plain_logits

REQUESTS = 32


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(count)]


def storm(rig: Rig, seed: int, *, rate: float = 0.35, longest: int = 14, requests: int = REQUESTS) -> None:
    """Requests arrive at random steps: shared prefixes, later turns of earlier ones, forks within a block."""
    chance = random.Random(seed)
    stems = [tokens(chance, chance.randint(20, 70)) for _ in range(3)]
    count = 0
    while count < requests or rig.engine.has_work:
        while count < requests and (chance.random() < rate or not rig.engine.has_work):
            finished = [turn for turn in rig.turns.values() if turn.done and len(turn.ids) < 150]
            if finished and chance.random() < 0.5:
                prompt = chance.choice(finished).ids  # the next turn, generated tokens included
                if chance.random() < 0.3:
                    prompt = prompt[: chance.randint(1, len(prompt))]
            else:
                prompt = chance.choice(stems)[: chance.randint(1, 70)]
            sampling = {} if chance.random() < 0.8 else {"temperature": 1.0, "seed": count}
            prompt = prompt + tokens(chance, chance.randint(0, 12))
            rig.add(f"r{count}", prompt, chance.randint(1, longest), **sampling)
            count += 1
        rig.step()


def assert_exact(rig: Rig, tolerance: float = TOLERANCE) -> None:
    worst = rig.differences()
    assert max(worst.values()) < tolerance, worst
    assert rig.check_greedy() <= sum(len(turn.outputs) for turn in rig.turns.values()) / 10_000


def test_storm_with_room(representative: Any, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(representative, blocks=200, block_size=16, budget=64)
    storm(rig, seed=1)
    assert_exact(rig)
    hits = sum(turn.cached for turn in rig.turns.values())
    assert hits > 0.3 * sum(len(turn.prompt) for turn in rig.turns.values())
    assert any(turn.cached % 16 for turn in rig.turns.values()), "no partial tail was reused"
    assert rig.engine.load().preemptions_total == 0


def test_storm_in_a_small_pool_with_small_chunks(representative: Any, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(representative, blocks=30, block_size=8, budget=24, slots=12)
    storm(rig, seed=2, rate=0.7, longest=40)
    assert_exact(rig)
    load = rig.engine.load()
    assert load.preemptions_total > 0
    assert load.evictions_total > 0
    assert sum(turn.cached for turn in rig.turns.values()) > 0


def test_chunked_cached_and_beside_others(model: Any, make_rig: Callable[..., Rig]) -> None:
    """And one corrupted cached block is noticed: the comparison would be worthless if it did not fail then."""
    chance = random.Random(3)
    rig = make_rig(model, blocks=64, block_size=16, budget=37)
    first = rig.add("first", tokens(chance, 70), 6)
    rig.add("beside", tokens(chance, 41), 30)
    rig.run()
    rig.add("second", first.ids + tokens(chance, 40), 6)
    rig.add("forked", first.ids[:52] + tokens(chance, 7), 6)
    rig.run()
    assert rig.turns["second"].cached == 75
    assert rig.turns["forked"].cached >= 48
    assert_exact(rig)
    _, blocks = rig.engine.kv.locate(b"tenant root 16 b", first.ids)
    rig.runner.pool.data[blocks[3]] += 0.05
    rig.add("corrupted", first.ids + tokens(chance, 5), 6)
    rig.run()
    worst = rig.differences()
    assert worst.pop("corrupted") > 10 * TOLERANCE
    assert max(worst.values()) < TOLERANCE


@pytest.mark.parametrize("name", [*REPRESENTATIVE, "granite-swa", "flint", "deepseek-v2"])
def test_greedy_equals_generate(name: str, make_rig: Callable[..., Rig]) -> None:
    model = make_model(name)
    prompt = tokens(random.Random(4), 37)
    expected = model.generate(
        torch.tensor([prompt], device=model.device),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    rig = make_rig(model, budget=11)
    for request in ("cold", "warm"):
        turn = rig.add(request, prompt, 40)
        rig.run()
        assert turn.outputs == expected
    assert rig.turns["warm"].cached == 36
    assert_exact(rig)


def test_sampled_tokens_do_not_depend_on_company_or_chunks(make_rig: Callable[..., Rig]) -> None:
    chance = random.Random(5)
    prompts = [tokens(chance, chance.randint(5, 60)) for _ in range(6)]
    alone: list[list[int]] = []
    for at, prompt in enumerate(prompts):
        rig = make_rig(make_model("qwen2"))
        alone.append(rig.add("r", prompt, 20, temperature=0.8, top_p=0.9, top_k=50, seed=at).outputs)
        rig.run()
    together = make_rig(make_model("qwen2"), budget=17, block_size=4, blocks=120)
    turns = [
        together.add(f"r{at}", prompt, 20, temperature=0.8, top_p=0.9, top_k=50, seed=at)
        for at, prompt in enumerate(prompts)
    ]
    together.run()
    assert [turn.outputs for turn in turns] == alone


def test_up_to_the_last_position_of_the_context(representative: Any, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(representative, budget=100)
    turn = rig.add("r", tokens(random.Random(6), CONTEXT - 4), 4)
    rig.run()
    assert len(turn.ids) == CONTEXT
    assert_exact(rig)


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_other_block_sizes(block_size: int, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(make_model("llama"), block_size=block_size, blocks=2400 // block_size, budget=40)
    storm(rig, seed=7)
    assert_exact(rig)


def test_nan_of_one_request_does_not_spread(make_rig: Callable[..., Rig]) -> None:
    """Blocks are reused without being wiped: what a broken sequence left in one must not reach another."""
    rig = make_rig(make_model("llama"), blocks=40)
    rig.runner.pool.data.fill_(float("nan"))
    chance = random.Random(8)
    for at in range(6):
        rig.add(f"r{at}", tokens(chance, 10 + 7 * at), 10)
    rig.run()
    assert_exact(rig)


def test_bfloat16_errs_no_more_than_transformers(model: Any, make_rig: Callable[..., Rig]) -> None:
    """Teacher-forced: both compute logits of the same tokens, the measure is the distance to an fp32 oracle."""
    chance = random.Random(9)
    history, new = tokens(chance, 90), tokens(chance, 40)
    oracle = plain_logits(model, history + new)
    half = copy.deepcopy(model).to(torch.bfloat16)
    theirs = (plain_logits(half, history + new).float() - oracle).abs()[len(history) :].mean()
    rig = make_rig(half, budget=37)
    rig.add("history", history, 1)
    rig.run()
    turn = rig.add("r", history + new, 1)
    rig.run()
    assert turn.cached == len(history)
    noted = rig.logits["r"]
    ours = torch.stack([(noted[at].float() - oracle[at]).abs().mean() for at in range(len(history), len(oracle))])
    assert ours.mean() <= 1.2 * theirs
