"""A stream that began at a worker of our own goes on at a vLLM server of the same weights as it would have, and back.

Both compute in float32 but add in different orders: a stream may part where the logits are a near tie.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import own_engine
import pytest
import vllm_engine
from rigs import EngineRig, Stream, greedy, sampled

from kvfleet.worker.port.sequence_spec import SequenceSpec
from tests.support.near_ties import is_near_tie

TOKENS = 48
CUTS = (1, 7, 24, 47)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.4},
    "cut off": {"top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 30, "ignore_eos": False, "temperature": 1.3},
}


@pytest.fixture
async def rigs(model_folder: Path) -> AsyncIterator[dict[str, EngineRig]]:
    rigs = {"own": await own_engine.torch(model_folder, 8), "vllm": await vllm_engine.start(model_folder, 8)}
    yield rigs
    for rig in rigs.values():
        await rig.close()


def is_right(spec: SequenceSpec, uncut: Stream, count: int, rest: Stream) -> bool:
    if (rest.ids, rest.text, rest.reason) == (uncut.ids[count:], "".join(uncut.pieces[count:]), uncut.reason):
        return True
    whole = uncut.ids[:count] + rest.ids
    return whole != uncut.ids and is_near_tie(spec.prompt_ids, spec.sampling, spec.choice, uncut.ids, whole)


def rests(spec: SequenceSpec, uncut: Stream) -> Sequence[SequenceSpec]:
    sent = {count: len("".join(uncut.pieces[:count])) for count in CUTS if count < len(uncut.ids)}
    return [replace(spec, attempt=n, output_ids=uncut.ids[:n], text_sent=sent[n]) for n in sent]


async def test_a_stream_goes_on_at_the_other_engine(rigs: dict[str, EngineRig]) -> None:
    prompt = next(iter(rigs.values())).prompt(60)
    for begins, ends in permutations(rigs):
        first, other = rigs[begins], rigs[ends]
        specs = [first.spec(f"{begins} {way}", prompt, sampled(TOKENS, **fields)) for way, fields in WAYS.items()]
        specs += [replace(spec, request=f"{spec.request} of two", choice=1) for spec in specs]
        specs.append(first.spec(f"{begins} greedy", prompt, greedy(TOKENS)))
        for spec, uncut in zip(specs, await first.run_all(*specs), strict=True):
            cuts = rests(spec, uncut)
            assert len(cuts) >= 3
            for cut, rest in zip(cuts, await other.run_all(*cuts), strict=True):
                assert is_right(spec, uncut, len(cut.output_ids), rest), (spec.request, cut.output_ids, rest)
