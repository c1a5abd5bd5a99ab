"""Makes a loaded model a runner: chooses the attention and the KV's number format, and fuses layers on a CPU.

On a GPU it also measures, before the pool is made, the memory of the largest step besides weights and pool; on the host
that is small beside the pool.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvcpu.vector.numbers import SCALE_BYTES
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.attention.trial import differs
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.fused.fuse import optimise
from kvfleet.worker.model.loader import LoadedModel
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.model.support import name_of, trial_positions
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import InvalidRequest, OutOfMemory, UnsupportedModel
from kvproto.messages import Sampling
from kvsampling import sampler
from kvsampling.draw import Draw

log = logging.getLogger(__name__)

Attention = Literal["auto", "cpu", "triton", "reference"]
KvDtype = Literal["auto", "int8"]
SPARE = 1.1  # factor on a step's measured memory: allocators waste some


def with_kv_dtype(loaded: LoadedModel, kv_dtype: KvDtype, block_size: int) -> LoadedModel:
    """Raises UnsupportedModel where int8 runs would not be aligned."""
    if kv_dtype == "auto":
        return loaded
    if loaded.kv_shape.head_dim * block_size % SCALE_BYTES:
        sizes = f"a head_dim of {loaded.kv_shape.head_dim} and blocks of {block_size} tokens"
        why = f"an int8 KV cache with {sizes} is not supported: their product must be a multiple of 4"
        raise UnsupportedModel(why, field="kv_dtype")
    return replace(loaded, kv_shape=replace(loaded.kv_shape, quantized=True))


def build_runner(
    loaded: LoadedModel,
    blocks: int,
    block_size: int,
    attention: Attention = "auto",
    make: Callable[..., TorchRunner] = TorchRunner,
) -> TorchRunner:
    """A runner on as many threads as torch has; `reference` leaves the model as transformers made it, and so does `cpu`
    on a part of a model: only its attention is fast there.

    Raises InvalidRequest if the attention cannot run here, and OutOfMemory if the KV pool does not fit.
    """
    chosen = _chosen(attention, loaded.device)
    backend: AttentionBackend = ReferenceBackend()
    if chosen == "triton":
        backend = _triton(loaded, block_size)
    elif chosen == "cpu":
        from kvcpu.attention.backend import CpuBackend

        threads = torch.get_num_threads()
        backend = CpuBackend(threads)
        before = trial_logits(loaded, block_size)
        if loaded.ranks == 1:
            optimise(loaded.model, threads, lambda: trial_logits(loaded, block_size))
        _check_unchanged(loaded, before, trial_logits(loaded, block_size, backend))
    runner = make(loaded, backend, blocks, block_size)
    runner.pool.reach(0)
    sampler.warm_up(loaded.device)
    log.info("%s attention on %s", backend.name, loaded.device)
    return runner


def _chosen(attention: Attention, device: torch.device) -> Attention:
    """Raises InvalidRequest if it cannot run here. Without a GPU, Triton runs where its interpreter is asked for."""
    if attention == "auto":
        return "cpu" if device.type == "cpu" else "triton"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (attention == "cpu" and device.type != "cpu") or (
        attention == "triton" and device.type == "cpu" and not interpreted
    ):
        raise InvalidRequest(f"the {attention} attention cannot run on {device}", field="attention")
    return attention


def _triton(loaded: LoadedModel, block_size: int) -> AttentionBackend:
    """Raises UnsupportedModel if it computes something else, or does not run."""
    from kvgpu.attention.backend import TritonBackend

    backend, shape = TritonBackend(loaded.device), loaded.kv_shape
    heads = int(getattr(loaded.config, "num_attention_heads", shape.kv_heads * loaded.ranks)) // loaded.ranks
    softcap = getattr(loaded.config, "attn_logit_softcapping", None)
    try:
        why = differs(backend, shape, heads, block_size, loaded.device, softcap)
    except Exception as error:
        log.warning("the triton attention does not run on %s", loaded.device, exc_info=True)
        why = f"attention does not run ({type(error).__name__})"
    if why:
        why = f"{why} on {loaded.device}; `--attention reference` serves it"
        raise UnsupportedModel(f"{name_of(loaded.config)}: {why}", field="attention")
    return backend


def trial_logits(loaded: LoadedModel, block_size: int, backend: AttentionBackend | None = None) -> Tensor:
    """Logits `[tokens, vocab]` of one token at each of `trial_positions`. The tokens attend to one another as if they
    stood side by side, so that late positions need no long context."""
    positions = trial_positions(loaded.config, loaded.context_length)
    count = len(positions)
    ids = [loaded.vocab_size * (at + 1) // (count + 1) for at in range(count)]
    blocks = -(-count // block_size)
    plain = replace(loaded, kv_shape=replace(loaded.kv_shape, quantized=False))
    runner = TorchRunner(plain, backend or ReferenceBackend(), blocks, block_size)
    batch = RaggedBatch.of([Slice(ids, 0, range(blocks), None)], block_size)
    with torch.inference_mode():
        return runner.logits(replace(batch, positions=np.array(positions, dtype=np.int64)), np.arange(count)).float()


def _check_unchanged(loaded: LoadedModel, before: Tensor, after: Tensor) -> None:
    """Each part was tried when it was replaced; this checks the whole. Raises UnsupportedModel."""
    if loaded.kv_shape.dtype is torch.float32:
        same = float((after - before).abs().max()) <= 1e-3 * float(before.abs().max())
    else:
        same = float((after - before).abs().mean()) <= 0.1 * float(before.std())
    if not same:
        why = "made fast it would compute something else; `--attention reference` serves it"
        raise UnsupportedModel(f"{name_of(loaded.config)}: {why}", field="attention")


@dataclass(eq=False, slots=True)
class CudaMeter:
    """Measures the peak of a device's allocated memory."""

    device: torch.device
    _before: int = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        """The most that was allocated since `begin`, beyond what was allocated then."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self._before

    def end(self) -> None:
        torch.cuda.empty_cache()


def meter_of(device: torch.device) -> CudaMeter | None:
    return CudaMeter(device) if device.type == "cuda" else None


def step_bytes(loaded: LoadedModel, block_size: int, tokens: int, meter: CudaMeter | None) -> int:
    """Memory of a step of so many prompt tokens; 0 without a meter. A step that does not fit is halved until it does,
    as the engine computes it in parts. Raises OutOfMemory if one token does not fit."""
    if meter is None:
        return 0
    count = min(tokens, loaded.context_length)
    while True:
        try:
            taken = int(_measured(loaded, block_size, count, meter) * SPARE)
        except OutOfMemory as error:
            if count == 1 or loaded.ranks > 1:  # other ranks do not know of it
                raise
            log.warning("a step of %d tokens does not fit beside the weights: %s", count, error)
            count //= 2
            continue
        finally:
            meter.end()
        log.info("a step of %d tokens takes %.2f GiB", count, taken / 2**30)
        return taken


def _measured(loaded: LoadedModel, block_size: int, count: int, meter: CudaMeter) -> int:
    blocks = -(-count // block_size)
    runner = TorchRunner(loaded, ReferenceBackend(), blocks, block_size)
    ids = [at % loaded.vocab_size for at in range(count)]
    meter.begin()
    runner.run([Slice(ids, 0, range(blocks), Draw(Sampling(1, temperature=0.0), 0, 0))])
    return meter.peak_bytes()
