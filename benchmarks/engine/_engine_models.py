"""The two models on which engines are compared: the same random weights for every engine, made once and kept.

Hugging Face folders with safetensors under KVFLEET_BENCH_DIR (default ~/.cache/kvfleet-bench); an engine that reads
another format converts from these folders. Random weights must not make greedy decoding trivial: at the usual
initializer range of 0.02 the tied embeddings dominate, and a sequence soon repeats one token; at 0.05 (`RANGE`) it
wanders, with the first logit some tenths of a standard deviation above the second.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast, Qwen2Config

Name = Literal["gpt2", "qwen2-0.5b"]
Dtype = Literal["float32", "bfloat16"]
NATIVE: dict[Name, Dtype] = {"gpt2": "float32", "qwen2-0.5b": "bfloat16"}
RANGE = 0.05
SEED = 0
VERSION = 1  # in the folder's name: raise it when the weights change, so that no engine keeps old ones

_NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "initializer_range": RANGE}


def config_of(name: Name) -> GPT2Config | Qwen2Config:
    """GPT-2 124M, or the shape of Qwen2-0.5B with a context of 4,096. Neither ever ends by itself."""
    if name == "gpt2":
        return GPT2Config(**_NO_ENDS)
    return Qwen2Config(
        hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
        vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=4096, **_NO_ENDS,
    )  # fmt: skip


def model_folder(name: Name, dtype: Dtype | None = None) -> Path:
    """The model's folder in `dtype` (default: its own), made if it is not there yet (seconds, and up to 2 GB of disk).

    The numbers are those of the model's own dtype whatever `dtype` is: the fp32 Qwen is the bf16 one, widened.
    """
    wanted = dtype or NATIVE[name]
    home = Path(os.environ.get("KVFLEET_BENCH_DIR") or Path.home() / ".cache" / "kvfleet-bench")
    folder = home / f"{name}-{wanted}-v{VERSION}"
    if not folder.exists():
        home.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=home))
        try:
            _save(name, wanted, made)
            made.chmod(0o755)
            made.rename(folder)  # whole or not at all
        except OSError:
            if not folder.exists():  # else somebody else made it meanwhile
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _save(name: Name, dtype: Dtype, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    model = model.to(getattr(torch, NATIVE[name])).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer_of(model.config.vocab_size).save_pretrained(folder)


def with_context(folder: Path, context: int, target: Path) -> Path:
    """The same weights, in `target`, for longer sequences."""
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": context}
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))
    return target


def small_config(folder: Path) -> Path:
    """A folder without weights, of a model so small that tens of thousands of tokens are computed within a minute."""
    config = Qwen2Config(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=1024,
        vocab_size=4096, tie_word_embeddings=True, max_position_embeddings=32_768, architectures=["Qwen2ForCausalLM"],
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(folder)
    tokenizer_of(config.vocab_size).save_pretrained(folder)
    return folder


def tokenizer_of(vocab_size: int) -> PreTrainedTokenizerFast:
    """Token 17 is the word "t17": every list of ids is a text and back, and no engine lacks a tokenizer."""
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0")
