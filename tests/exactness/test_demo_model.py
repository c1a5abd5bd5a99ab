"""The bundled demo model through the engine: exact, and reused over the turns of a chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tiny_models import TOLERANCE, Rig
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import kvfleet.worker
from kvchat.tool_grammar import Dialect, Tool, grammar_of
from kvfleet.worker.model.loader import load_model
from kvfleet.worker.text.detokenizer import Detokenizer
from kvproto.messages import Grammar, GrammarForm
from kvsampling.grammar import form_of

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


NOTE = Tool("note", {"type": "object", "properties": {"to": {"type": "string", "maxLength": 9}}, "required": ["to"]})
CALLS = [
    grammar_of(name, [NOTE], Dialect(), must_call=True, parallel=False) for name in ("hermes", "pythonic", "mistral")
]
TEXTS = [
    Grammar(GrammarForm.REGEX, pattern)
    for pattern in (r"[A-Z][a-z]{2,8}( [a-z]{1,9}){3,9}[.!]", r"(\d{1,3}\.){3}\d{1,3}", r"(thou|you|é+){2,5}")
]


@pytest.mark.parametrize("grammar", TEXTS + CALLS)
def test_greedy_with_a_grammar_equals_generate(tokenizer: Tokenizer, grammar: Grammar) -> None:
    """Transformers asks another matcher what may come next. In a small pool the engine's sequences begin anew."""
    demo = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ends = demo.generation_config.eos_token_id
    words = LLTokenizer(tokenizer.to_str(), eos_token=ends)

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        matcher = LLMatcher(words, form_of(grammar))
        assert matcher.consume_tokens(ids[len(prompt) :].tolist())
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return [int(token) for token in bits.nonzero()[0]]

    rig = Rig(demo, blocks=15, budget=40, block_size=8, detokenizer=Detokenizer(tokenizer))
    turns, expected = [], []
    for name in ("ROMEO", "JULIET", "HAMLET", "NURSE", "KING RICHARD III"):
        prompt = tokenizer.encode(f"<|system|>You are {name}.<|end|><|user|>Speak!<|end|><|assistant|>").ids
        ids = torch.tensor([prompt])
        out = demo.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            prefix_allowed_tokens_fn=allowed,
        )
        expected.append([token for token in out[0, len(prompt) :].tolist() if token not in ends])
        turns.append(rig.add(name, prompt, 40, grammar=grammar))
    rig.run()
    assert [turn.outputs for turn in turns] == expected
    assert rig.engine.load().preemptions_total > 0
