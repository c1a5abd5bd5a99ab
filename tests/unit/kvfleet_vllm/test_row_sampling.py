"""Rows of vLLM's batch draw what the own engine's sampler draws, wherever a sequence began."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from kvfleet_vllm.row_sampling import SampledRow, choose, sampling_of
from kvfleet_vllm.wire import VERSION
from kvproto.messages import Sampling
from kvsampling.draw import Draw
from kvsampling.sampler import sample
from tests.support.devices import DEVICES

VOCAB = 600
PROMPT = [5, 6, 7, 5]
STOPS = (1, 2)


def asked(
    wants: Sampling, prompt: int = len(PROMPT), choice: int = 0, failures: str = "/nowhere", dropped: Sequence[int] = ()
) -> dict[str, Any]:
    """As JSON brings it."""
    fields = {name: value for name, value in asdict(wants).items() if value is not None}
    fields["logit_bias"] = {str(token): value for token, value in wants.logit_bias.items()}
    return {
        "version": VERSION, "request": "r", "choice": choice, "prompt": prompt, "dropped": list(dropped),
        "stop_ids": list(STOPS),
        "sampling": fields, "failures": failures, "grammar": None,
    }  # fmt: skip


def logits(step: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(step)) * 3


ASKED = [
    Sampling(20, temperature=0.8, seed=11),
    Sampling(20, temperature=1.3, top_k=50, top_p=0.9, seed=2**63 + 5),
    Sampling(20, temperature=0.7, min_p=0.05, seed=3, presence_penalty=1.0, frequency_penalty=0.5),
    Sampling(20, temperature=1.0, seed=4, repetition_penalty=1.4, logit_bias={9: 50.0, 3: -100.0}, min_tokens=8),
    Sampling(20, temperature=0.0, repetition_penalty=1.8),
]


def expected(wants: Sampling, choice: int = 0) -> list[int]:
    outputs: list[int] = []
    for index in range(20):
        banned = STOPS if index < wants.min_tokens else ()
        drawn = sample(logits(index), [Draw(wants, choice, index, PROMPT, outputs, banned)])[0]
        assert isinstance(drawn, int)
        outputs.append(drawn)
    return outputs


def generate(wants: Sampling, before: list[int], choice: int = 0, device: str = "cpu") -> list[int]:
    outputs: list[int] = []
    row = SampledRow.of(asked(wants, choice=choice), [*PROMPT, *before], outputs)
    for index in range(len(before), 20):
        batch = torch.cat([torch.zeros(1, VOCAB), logits(index)]).to(device)
        choose(batch, {1: row})
        assert not batch[0].any()
        outputs.append(int(batch[1].argmax()))
    return outputs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wants", ASKED)
@pytest.mark.parametrize("cut", [0, 1, 7, 19])
def test_a_row_draws_as_the_own_engine_wherever_it_began(wants: Sampling, cut: int, device: str) -> None:
    whole = expected(wants)
    assert generate(wants, whole[:cut], device=device) == whole[cut:]


@pytest.mark.parametrize("wants", ASKED)
def test_a_row_whose_context_slid_draws_as_one_that_has_all(wants: Sampling) -> None:
    whole, known = expected(wants), 9
    seen = [*PROMPT, *whole[:known]]
    row = SampledRow.of(asked(wants, dropped=seen[:6]), seen[6:], [])
    batch = logits(known)
    choose(batch, {0: row})
    assert int(batch[0].argmax()) == whole[known]


def test_choices_differ() -> None:
    assert generate(ASKED[0], [], 1) == expected(ASKED[0], 1) != expected(ASKED[0], 0)


def test_rows_of_one_batch_do_not_matter_to_each_other() -> None:
    rows = {at: SampledRow.of(asked(wants), PROMPT, []) for at, wants in zip((0, 2, 3, 7, 9), ASKED, strict=True)}
    batch = torch.cat([logits(at) for at in range(8)])  # row 9 is not in this batch
    alone = [int(one.argmax()) for one in batch]
    for at, row in rows.items():
        if at < 8:
            single = logits(at)
            choose(single, {0: row})
            alone[at] = int(single.argmax())
    choose(batch, rows)
    assert batch.argmax(-1).tolist() == alone


def test_the_chosen_token_is_the_only_change() -> None:
    batch = logits(0)
    choose(batch, {0: SampledRow.of(asked(ASKED[0]), PROMPT, [])})
    assert (batch != logits(0)).sum() == 1


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_the_worker_hears_of_a_row_that_cannot_be_drawn(tmp_path: Path, broken: float) -> None:
    path = str(tmp_path / "failures")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
        worker.bind(path)
        worker.setblocking(False)
        bad, good = (SampledRow.of(asked(ASKED[0], failures=path), PROMPT, [8, 9]) for _ in range(2))
        batch = torch.cat([logits(0), logits(2)])
        batch[0, 4] = broken
        choose(batch, {0: bad, 1: good})
        assert msgpack.unpackb(worker.recv(65_536)) == [
            "r", 0, 2, "engine_failure", "the model computed logits that are not finite",
        ]  # fmt: skip
        with pytest.raises(BlockingIOError):
            worker.recv(1)
    assert int(batch[1].argmax()) == expected(ASKED[0])[2]


def test_a_worker_that_is_gone_costs_nothing() -> None:
    batch = torch.full((1, VOCAB), float("nan"))
    choose(batch, {0: SampledRow.of(asked(ASKED[0]), PROMPT, [])})
    assert batch.isnan().all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": VERSION + 1}, f"version {VERSION + 1}"),
        ({"version": None}, "version None"),
        ({"seed": 5}, "seed"),
        ({"sampling": {"max_tokens": 5, "tempreature": 1.0}}, "tempreature"),
    ],
)
def test_what_another_version_asks_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sampling_of(asked(ASKED[0]) | change)
