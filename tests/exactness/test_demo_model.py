"""The bundled demo model through the engine: exact, and reused over the turns of a chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import TOLERANCE, Rig
from tokenizers import Tokenizer

import kvfleet.worker
from kvfleet.worker.model.loader import load_model

FOLDER = Path(kvfleet.worker.__file__).parent / "model" / "demo_model"


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model(FOLDER, dtype="float32", device="cpu").model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_turns_of_a_chat(demo: Any, tokenizer: Tokenizer) -> None:
    rig = Rig(demo, blocks=256, budget=48)
    history: list[int] = tokenizer.encode("<|user|>Good morrow, my lord.<|end|><|assistant|>").ids
    fed = cached = 0
    for turn in range(3):
        done = rig.add(f"turn{turn}", history, 24)
        rig.run()
        assert done.cached == cached
        stopped = len(done.outputs) < 24
        fed += len(done.ids) - cached - (not stopped)
        assert rig.fed == fed
        cached = len(done.ids) - (not stopped)  # the last token is fed only if the stop token is drawn after it
        said = tokenizer.encode(f"<|end|><|user|>And {turn} more?<|end|><|assistant|>", add_special_tokens=False)
        history = done.ids + said.ids
    assert max(rig.differences().values()) < TOLERANCE
    assert rig.check_greedy() == 0


def test_many_speakers_at_once_in_a_small_pool(demo: Any, tokenizer: Tokenizer) -> None:
    rig = Rig(demo, blocks=24, budget=40, block_size=8)
    for at, name in enumerate(("ROMEO", "JULIET", "KING RICHARD III", "HAMLET", "NURSE", "GLOUCESTER")):
        ids = tokenizer.encode(f"<|system|>You are {name}.<|end|><|user|>Speak!<|end|><|assistant|>").ids
        rig.add(name, ids, 40, temperature=0.0 if at % 2 else 0.8, seed=at, ignore_eos=True)
    rig.run()
    assert max(rig.differences().values()) < TOLERANCE
    assert rig.check_greedy() == 0
    assert rig.engine.load().preemptions_total > 0
