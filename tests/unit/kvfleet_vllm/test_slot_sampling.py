"""A slot of vLLM's second model runner draws what a row of the first one does, wherever a sequence began."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet_vllm.row_sampling import SampledRow, choose
from kvfleet_vllm.slot_sampling import SlotSampling
from kvfleet_vllm.wire import VERSION
from kvproto.messages import Grammar, GrammarForm, Sampling
from kvsampling.grammar import Grammars

VOCAB = 300
PROMPT = [5, 6, 7, 5]
PLAIN = Sampling(12, temperature=0.9, top_p=0.9, seed=7)
PENALTIES = Sampling(12, temperature=0.9, seed=8, repetition_penalty=1.5, presence_penalty=1.0, min_tokens=3)
GRAMMAR = Sampling(12, temperature=0.9, seed=9, grammar=Grammar(GrammarForm.REGEX, "[a-z ]{40}"))
SLOT = 5


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Of the words that a row may be allowed."""
    text = (DEMO_FOLDER / "tokenizer.json").read_text()
    (tmp_path / "tokenizer").write_text(Grammars(lambda: text, VOCAB, [2]).to_json())
    return str(tmp_path / "tokenizer")


def asked(wants: Sampling, tokenizer: str) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(wants).items() if value is not None}
    grammar = fields.pop("grammar", None)
    return {
        "version": VERSION, "request": "r", "choice": 0, "dropped": [], "prompt": len(PROMPT), "stop_ids": [1],
        "sampling": fields | {"logit_bias": {}}, "failures": "/nowhere",
        "grammar": grammar and {**grammar, "tokenizer": tokenizer},
    }  # fmt: skip


def logits(step: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(step)) * 2


def expected(wants: Sampling, tokenizer: str) -> list[int]:
    outputs: list[int] = []
    row = SampledRow.of(asked(wants, tokenizer), PROMPT, outputs)
    for step in range(12):
        one = logits(step)
        choose(one, {0: row})
        outputs.append(int(one.argmax()))
    return outputs


class Device:
    """The ids of each slot, and how often they were fetched."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.fetched = 0

    def ids(self, slot: int, count: int) -> list[int]:
        self.fetched += 1
        assert count == len(self.rows[slot])
        return self.rows[slot][:count]


@pytest.mark.parametrize("wants", [PLAIN, PENALTIES, GRAMMAR])
@pytest.mark.parametrize("resumed", [0, 1, 7])  # outputs of an earlier attempt, which are in vLLM's prompt
@pytest.mark.parametrize("preempted", [None, 9])
def test_a_slot_draws_as_a_row(wants: Sampling, resumed: int, preempted: int | None, tokenizer: str) -> None:
    whole, device = expected(wants, tokenizer), Device()
    sampling = SlotSampling(device.ids)
    ids = device.rows[SLOT] = PROMPT + whole[:resumed]
    prompt = fill = len(ids)
    assert sampling.add(SLOT, asked(wants, tokenizer))
    for step in range(resumed, 12):
        if step == preempted:  # vLLM adds it again, with its outputs to be computed before the next
            sampling.add(SLOT, None)
            assert sampling.add(SLOT, asked(wants, tokenizer))
            fill = len(ids)
        batch = torch.cat([logits(99), logits(step)])
        sampling.choose(batch, [2, SLOT], [3, len(ids)], [3, prompt], [3, fill])
        assert torch.equal(batch[:1], logits(99))
        ids.append(int(batch[1].argmax()))
    assert ids == PROMPT + whole
    assert bool(device.fetched) == (wants is not PLAIN)


def test_a_part_of_a_prompt_is_not_drawn_for(tokenizer: str) -> None:
    sampling = SlotSampling(Device().ids)
    sampling.add(SLOT, asked(PENALTIES, tokenizer))
    one = logits(0)
    sampling.choose(one, [SLOT], [2], [len(PROMPT)], [len(PROMPT)])
    assert torch.equal(one, logits(0))


def test_a_slot_forgets_its_request(tokenizer: str) -> None:
    sampling = SlotSampling(Device().ids)
    sampling.add(SLOT, asked(PLAIN, tokenizer))
    assert not sampling.add(SLOT, None)
    one = logits(0)
    sampling.choose(one, [SLOT], [4], [4], [4])
    assert torch.equal(one, logits(0))
