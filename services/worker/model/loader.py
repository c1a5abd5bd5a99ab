"""Loads a model from a folder or hub id, safetensors only and without remote code, or refuses it in one clear error."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvcpu.blocks import KvShape
from kvfleet.worker.model.attention.interface import attach
from kvfleet.worker.model.attention.latent import keep_latents
from kvfleet.worker.model.load_progress import LoadProgress, numbers_in
from kvfleet.worker.model.parallel.sharding import RankPart, shard
from kvfleet.worker.model.probe import probe
from kvfleet.worker.model.quick_imports import load_meta
from kvfleet.worker.model.recurrent import StateShape, recurrent_modules
from kvfleet.worker.model.support import name_of, own_context, refusal, supported_context
from kvproto.errors import InvalidRequest, UnsupportedModel

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
DUMMY_SEED = 0  # the same random weights in every worker, so that sequences can move between them


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode whose attention is ours."""

    model: Any
    config: Any
    kv_shape: KvShape
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    device: torch.device
    window: int | None = None  # see ModelRunner.window
    first_position: int = 0  # of a sequence's first token, as the model counts
    sinks: bool = False  # some layer's attention has them
    states: StateShape | None = None  # of recurrent layers
    ranks: int = 1  # processes that share the model; `kv_shape` is one's


def load_model(
    source: str | Path,
    *,
    load_format: LoadFormat = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    part: RankPart | None = None,
    progress: LoadProgress | None = None,
) -> LoadedModel:
    """`dummy` takes random weights and needs `config.json` only. `part`: of one rank, in a group that has joined.
    `progress` is told.

    Raises UnsupportedModel naming feature and model, InvalidRequest if there is no such model or device.
    """
    config = read_config(source)
    context_length = supported_context(config)
    where = device_of(device)
    what = dtype_of(dtype, config, where)
    progress = progress or LoadProgress()

    def loaded() -> tuple[Any, GenerationConfig | None]:
        if load_format == "dummy":
            with progress.weights(0):
                model, generation = random_model(config, what), _generation_config(source)
        else:
            with progress.weights(numbers_in(Path(source)) * what.itemsize):
                model = _trained_model(source, what)
            generation = model.generation_config
        if part is not None:
            if recurrent_modules(model):
                raise refusal(config, "a hybrid model over several ranks", "one rank serves it")
            shard(model, part)
        progress.doing = "trying the model"
        return model.to(where), generation

    try:
        model, generation = loaded()
    except NotImplementedError:  # an operator is missing on the meta device, where the empty model is made
        if not load_meta():
            raise
        model, generation = loaded()
    return adopt_model(model, context_length=context_length, generation=generation)


def adopt_model(
    model: Any, *, context_length: int | None = None, generation: GenerationConfig | None = None
) -> LoadedModel:
    """Raises UnsupportedModel naming feature and model."""
    config = model.config
    served = supported_context(config, context_length)
    model.eval().requires_grad_(False)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # a training loss over all tokens of the batch
    keep_latents(model)
    attention = probe(model, served)
    served = min(served, (own_context(config) or served) - attention.first_position)
    attach(model)
    return LoadedModel(
        model=model,
        config=config,
        kv_shape=attention.kv_shape,
        vocab_size=_vocab_size(model.get_output_embeddings()),
        context_length=served,
        eos_ids=_eos_ids(config, generation),
        device=model.get_input_embeddings().weight.device,
        window=attention.window,
        first_position=attention.first_position,
        sinks=attention.sinks,
        states=attention.states,
    )


def read_config(source: str | Path, wanted: str = "model can be loaded") -> Any:
    """Raises InvalidRequest if there is none."""
    try:
        return AutoConfig.from_pretrained(str(source), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"no {wanted} from {str(source)!r}: {_first_line(error)}", field="model") from error


def device_of(device: Device) -> torch.device:
    """Raises InvalidRequest if there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("no CUDA device is available", field="device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def dtype_of(dtype: Dtype, config: Any, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own, except half precision on a CPU, which computes it slowly and less exactly."""
    if dtype != "auto":
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    own = getattr(config, "dtype", None)
    if not isinstance(own, torch.dtype) or (own is torch.float16 and device.type == "cpu"):
        return torch.float32
    return own


def random_model(config: Any, dtype: torch.dtype) -> Any:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(DUMMY_SEED)
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        raise UnsupportedModel(f"{name_of(config)}: {_first_line(error)}", field="model") from error


def _trained_model(source: str | Path, dtype: torch.dtype) -> Any:
    safe = {"use_safetensors": True, "trust_remote_code": False}
    try:
        return AutoModelForCausalLM.from_pretrained(str(source), dtype=dtype, **safe)
    except ValueError as error:
        raise UnsupportedModel(f"{source}: {_first_line(error)}", field="model") from error
    except OSError as error:
        why = f"no weights can be loaded from {str(source)!r}: {_first_line(error)}"
        raise InvalidRequest(why, field="model") from error


def _generation_config(source: str | Path) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(str(source))
    except OSError:
        return None


def _vocab_size(head: Any) -> int:
    """Of the whole head, of which a rank may hold some rows."""
    return int(getattr(head, "out_features", head.weight.shape[0]))


def _eos_ids(config: Any, generation: GenerationConfig | None) -> tuple[int, ...]:
    for source in (generation, config):
        if (found := getattr(source, "eos_token_id", None)) is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
