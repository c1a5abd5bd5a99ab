"""The bundled model keeps what its card says: size, context, held-out loss, and answers that end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model import train_demo_model as recipe
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.loader import load_model
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.text.detokenizer import Detokenizer
from kvproto.block_hash import root
from kvproto.messages import ChoiceFinished, FinishReason, Sampling

DATA = Path(__file__).parents[3] / "shared" / "data" / "shakespeare.txt"


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """What the script printed, as the card holds it."""
    found = re.search(r"```(?:json)?\n(\{.*?\n\})\n```", (DEMO_FOLDER / "README.md").read_text(), re.DOTALL)
    assert found
    card: dict[str, Any] = json.loads(found.group(1))
    return card


def test_the_cards_figures_keep_the_floors(figures: dict[str, Any]) -> None:
    assert figures["held_out_bits_per_byte"] <= 2.2
    losses = figures["held_out_nats_per_token_by_position"]
    assert losses["1024-2047"] <= losses["256-511"]
    assert figures["chat_prompts"] == figures["chat_prompts_ended"]["greedy"] == 20
    assert (DEMO_FOLDER / "model.safetensors").stat().st_size == figures["safetensors_bytes"] <= 12_000_000
    assert json.loads((DEMO_FOLDER / "config.json").read_text())["max_position_embeddings"] >= 2048


def test_the_held_out_text_costs_what_the_card_says(figures: dict[str, Any]) -> None:
    if not DATA.exists():
        pytest.skip(f"{DATA} is not beside the repository")
    _, held_out = recipe.split(DATA.read_text())
    model = LlamaForCausalLM.from_pretrained(DEMO_FOLDER, dtype="float32")
    tokenizer = recipe.Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    bits = recipe.bits_per_byte(model, tokenizer, held_out)
    assert bits == pytest.approx(figures["held_out_bits_per_byte"], abs=0.002)
    assert bits <= 2.2


def test_twenty_chat_prompts_end_with_a_stop_token() -> None:
    loaded = load_model(DEMO_FOLDER, dtype="float32", device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    pool = BlockPool(1024, 16)
    engine = Engine(
        TorchRunner(loaded, ReferenceBackend(), 1024, 16),
        pool,
        Scheduler(pool),
        Detokenizer(Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))),
    )
    for number, prompt in enumerate(recipe.CHAT_PROMPTS):
        text = tokenizer.apply_chat_template(recipe.messages_of(prompt), tokenize=False, add_generation_prompt=True)
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        sampling = Sampling(400, temperature=0.0)
        engine.add(SequenceSpec(f"p{number}", 0, ids, sampling, root("demo", 16, b"")))
    ends = {}
    while engine.has_work:
        for output in engine.step().outputs:
            if isinstance(output, ChoiceFinished):
                ends[output.request] = output.reason
    assert len(ends) == 20
    assert set(ends.values()) == {FinishReason.STOP}
