"""Makes a loaded model a runner: chooses the attention and the KV's number format, fuses layers on a CPU, and records
decode steps on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvcpu.blocks import Batch
from kvcpu.vector.numbers import SCALE_BYTES
from kvfleet.worker.model.attention.choice import Attention, backend_for, chosen_for, heads_of
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.fused.fuse import optimise
from kvfleet.worker.model.gpu.decode_graphs import DecodeGraphs, Record, cuda_graphs, sizes_up_to
from kvfleet.worker.model.load_progress import LoadProgress
from kvfleet.worker.model.loader import LoadedModel
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.model.support import name_of, trial_positions
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import UnsupportedModel
from kvproto.messages import Sampling
from kvsampling import sampler
from kvsampling.draw import Draw

log = logging.getLogger(__name__)

KvDtype = Literal["auto", "int8"]
TRIED_TOKENS = 1024  # of each sequence, to try a recorded step


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
    graphs: int = 0,
    make: Callable[..., TorchRunner] = TorchRunner,
    progress: LoadProgress | None = None,
    backend: AttentionBackend | None = None,
    states: int = 1,
) -> TorchRunner:
    """A runner on as many threads as torch has; `reference` leaves the model as transformers made it, and so does `cpu`
    on a part of a model: only its attention is fast there. On a GPU decode steps of up to `graphs` sequences are
    recorded, but for hybrid models. `progress` is told; `backend`: what `backend_for` gave before; `states`: slots for
    recurrent states, if the model has any.

    Raises InvalidRequest if the attention cannot run here, and OutOfMemory if the KV pool does not fit.
    """
    progress = progress or LoadProgress()
    progress.doing = "making the kernels ready"
    backend = backend or backend_for(attention, loaded, block_size)
    if chosen_for(attention, loaded.device) == "cpu":
        from kvcpu.attention.backend import CpuBackend

        threads = torch.get_num_threads()
        backend = CpuBackend(threads)
        before = trial_logits(loaded, block_size)
        if loaded.ranks == 1:
            optimise(loaded.model, threads, lambda: trial_logits(loaded, block_size))
        _check_unchanged(loaded, before, trial_logits(loaded, block_size, backend))
    runner = make(loaded, backend, blocks, block_size, *([states] if loaded.states is not None else []))
    runner.pool.reach(0)
    sampler.warm_up(loaded.device)
    log.info("%s attention on %s", backend.name, loaded.device)
    if loaded.device.type == "cuda" and loaded.states is None:
        progress.doing = "recording decode steps"
        record_decodes(runner, loaded, backend, min(graphs, blocks), cuda_graphs(loaded.device))
    return runner


def record_decodes(
    runner: TorchRunner, loaded: LoadedModel, backend: AttentionBackend, most: int, record: Record
) -> None:
    """Has the runner replay decode steps of up to `most` sequences, as far as they can be recorded."""
    from kvgpu.attention.backend import TritonBackend
    from kvgpu.attention.decode_inputs import DecodeInputs

    size, blocks = runner.block_size, -(-loaded.context_length // runner.block_size)

    def is_right(count: int, replayed: Callable[[Batch], Tensor | None]) -> bool:
        length = max(1, min(runner.num_blocks // count, blocks, TRIED_TOKENS // size))
        end = min(length * size, loaded.context_length) - 1
        draw = Draw(Sampling(1), 0, 0)
        slices = [
            Slice([at % loaded.vocab_size], end, range(at * length, (at + 1) * length), draw) for at in range(count)
        ]
        batch = RaggedBatch.of(slices, size)
        with torch.inference_mode():
            wanted, found = runner.logits(batch, batch.rows), replayed(batch)
            return found is not None and _same(loaded, wanted.float(), found.float())

    if most and isinstance(backend, TritonBackend):
        inputs = DecodeInputs(backend, runner.pool, heads_of(loaded), most, most * blocks)
        runner.graphs = DecodeGraphs(loaded.model, inputs, loaded.first_position, record)
        runner.graphs.record(sizes_up_to(most), is_right)


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
    if not _same(loaded, before, after):
        why = "made fast it would compute something else; `--attention reference` serves it"
        raise UnsupportedModel(f"{name_of(loaded.config)}: {why}", field="attention")


def _same(loaded: LoadedModel, before: Tensor, after: Tensor) -> bool:
    if loaded.kv_shape.dtype is torch.float32:
        return float((after - before).abs().max()) <= 1e-3 * float(before.abs().max())
    return float((after - before).abs().mean()) <= 0.1 * float(before.std())
