"""Models of the tables: configurations, and folders of them. The weights are random, so no file of any is needed.

Numbers of weights at the usual range of 0.02 make a tied model say one token for ever; at 0.05 it wanders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvfleet.cli.paper.paper_table import FleetSpec, PaperModel

_OF_ALL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.05}
GPT2 = PaperModel("gpt2", {**_OF_ALL, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50_257})
GPT2_FLEET = FleetSpec(("--workers=1", "--vaults=0"), (GPT2,))

SMALL: dict[str, Any] = {
    **_OF_ALL, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def small_qwen2(name: str, **config: Any) -> PaperModel:
    return PaperModel(name, {**SMALL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **config})


def small_mistral(name: str, **config: Any) -> PaperModel:
    return PaperModel(name, {**SMALL, "model_type": "mistral", "architectures": ["MistralForCausalLM"], **config})


def write_config(model: PaperModel, inside: Path) -> Path:
    """A folder of its name with its configuration, of which its sizes are computed."""
    folder = inside / model.name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    return folder


def write_model(model: PaperModel, inside: Path) -> Path:
    """A tokenizer of words beside the configuration: what a worker with random weights needs."""
    folder = write_config(model, inside)
    words = {"type": "WordLevel", "vocab": {f"t{at}": at for at in range(model.vocab_size)}, "unk_token": "t0"}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": words,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return folder


def words_of(ids: Iterable[int]) -> str:
    """The text of tokens, which continues another one."""
    return "".join(f" t{one}" for one in ids)
