"""Models whose layers do not see everything: exact, also when the blocks that no layer sees are gone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tiny_configs import CONFIGS, CONTEXT, VOCAB, WINDOW
from tiny_models import TOLERANCE, make_model, plain_logits
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config

from kvfleet.worker.model.attention.interface import NAME, AttentionBackend, paged_attention
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.loader import adopt_model
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.schedule.step_plan import Slice

BLOCK = 8
ALL_WINDOWED = ("mistral-window", "starcoder2", "phi3", "mixtral")
MIXED = ("qwen2-window", "gemma2", "gemma3", "cohere2", "olmo3", "exaone4", "gpt-oss", "granite-swa")


@pytest.mark.parametrize("name", CONFIGS)
def test_window_is_that_of_the_layer_which_sees_furthest(name: str) -> None:
    assert adopt_model(make_model(name)).window == (WINDOW if name in ALL_WINDOWED else None)


def test_window_as_long_as_the_served_context_is_none() -> None:
    model = make_model("mistral-window")
    assert adopt_model(model, context_length=WINDOW + 1).window == WINDOW
    assert adopt_model(model, context_length=WINDOW).window is None
    config = Qwen2Config(
        use_sliding_window=False, sliding_window=WINDOW, vocab_size=VOCAB, hidden_size=32, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    assert adopt_model(AutoModelForCausalLM.from_config(config)).window is None


class Tables:
    """Block tables of several sequences that give away each block which the window has left behind."""

    def __init__(self, runner: TorchRunner, window: int | None) -> None:
        self._runner = runner
        self._window = window
        self._free = list(range(runner.num_blocks))
        self.of: dict[int, list[int]] = {}
        self.given_away = 0

    def extend(self, sequence: int, start: int, end: int) -> list[int]:
        """For tokens [start, end): entries in front that no token from `start` on can see become -1."""
        table = self.of.setdefault(sequence, [])
        unseen = max(0, start + 1 - self._window) // BLOCK if self._window is not None else 0
        for at, block in enumerate(table[:unseen]):
            if block >= 0:
                self._runner.pool.data[block] = float("nan")
                self._free.append(block)
                self.given_away += 1
                table[at] = -1
        while len(table) * BLOCK < end:
            table.append(self._free.pop())
        return list(table)


def run_by_hand(runner: TorchRunner, tables: Tables, ids: list[list[int]], steps: list[list[int]]) -> list[Tensor]:
    """Logits of all sequences, fed in `steps`: how many tokens of each sequence a step takes."""
    logits: list[list[Tensor]] = [[] for _ in ids]
    done = [0] * len(ids)
    for counts in steps:
        slices, owners = [], []
        for at, count in enumerate(counts):
            if count:
                start, end = done[at], done[at] + count
                slices.append(Slice(ids[at][start:end], start, tables.extend(at, start, end), None))
                owners.append(at)
                done[at] = end
        batch = RaggedBatch.of(slices, BLOCK)
        with torch.inference_mode():
            rows = runner.logits(batch, np.arange(len(batch.ids))).cpu()
        for at, first, part in zip(owners, batch.first, slices, strict=True):
            logits[at].append(rows[first : first + len(part.ids)])
    assert done == [len(sequence) for sequence in ids]
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("name", [*ALL_WINDOWED, *MIXED])
def test_exact_while_blocks_out_of_reach_are_given_away(name: str, backend: AttentionBackend) -> None:
    model = make_model(name)
    loaded = adopt_model(model)
    runner = TorchRunner(loaded, backend, 48, BLOCK)
    runner.pool.data.fill_(float("nan"))
    chance = random.Random(11)
    ids = [[chance.randrange(VOCAB) for _ in range(length)] for length in (130, 70, 59)]
    steps = [[50, 0, 0], [40, 10, 0], [1, 30, 24], *([[1, 1, 1]] * 30), [9, 0, 5]]
    tables = Tables(runner, loaded.window)
    logits = run_by_hand(runner, tables, ids, steps)
    for sequence, ours in zip(ids, logits, strict=True):
        assert (ours - plain_logits(model, sequence)).abs().max() < TOLERANCE
    assert tables.given_away == (0 if name in MIXED else 12 + 5 + 3)
    most = max(sum(block >= 0 for block in table) for table in tables.of.values())
    assert most == (17 if name in MIXED else 5)


def test_control_another_window_is_noticed(backend: AttentionBackend) -> None:
    model, other = make_model("mistral-window"), make_model("mistral-window")
    other.config.sliding_window = WINDOW + 1
    chance = random.Random(12)
    ids = [chance.randrange(VOCAB) for _ in range(60)]
    runner = TorchRunner(adopt_model(other), backend, 8, BLOCK)
    (logits,) = run_by_hand(runner, Tables(runner, None), [ids], [[60]])
    worst = (logits - plain_logits(model, ids)).abs().amax(dim=-1)
    assert worst[:WINDOW].max() < TOLERANCE
    assert worst[WINDOW:].max() > 10 * TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_no_mask_is_built_for_a_ragged_batch(name: str) -> None:
    """Nor does it look packed to transformers, whose positions begin again in the middle of the row."""
    runner = TorchRunner(adopt_model(make_model(name)), ReferenceBackend(), 16, BLOCK)
    masks: list[Any] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any) -> Any:
        masks.append(attention_mask)
        return paged_attention(module, query, key, value, attention_mask, **keywords)

    AttentionInterface.register(NAME, spy)
    try:
        run_by_hand(runner, Tables(runner, None), [[1] * 20, [2] * 30], [[20, 30]])
    finally:
        AttentionInterface.register(NAME, paged_attention)
    assert masks == [None] * runner.num_layers
