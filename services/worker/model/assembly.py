"""Makes a loaded model a runner: chooses the attention and the KV's number format, and fuses layers on a CPU.

On a GPU it also measures, before the pool is made, the memory of the largest step besides weights and pool; on the host
that is small beside the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvcpu.blocks import Batch
from kvcpu.vector.numbers import SCALE_BYTES
from kvfleet.worker.model.attention.choice import Attention, chosen_for, heads_of, tried_backend
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.decode_graphs import DecodeGraphs, Record, cuda_graphs, sizes_up_to
from kvfleet.worker.model.fused.fuse import optimise
from kvfleet.worker.model.loader import LoadedModel
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.model.support import name_of, trial_positions
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import OutOfMemory, UnsupportedModel
from kvproto.messages import Sampling
from kvsampling import sampler
from kvsampling.draw import Draw

log = logging.getLogger(__name__)

KvDtype = Literal["auto", "int8"]
TRIED_TOKENS = 1024  # of each sequence, to try a recorded step
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
    loaded: LoadedModel, blocks: int, block_size: int, attention: Attention = "auto", graphs: int = 0
) -> TorchRunner:
    """A runner on as many threads as torch has; `reference` leaves the model as transformers made it. On a GPU decode
    steps of up to `graphs` sequences are recorded.

    Raises InvalidRequest if the attention cannot run here, and OutOfMemory if the KV pool does not fit.
    """
    chosen = chosen_for(attention, loaded.device)
    backend: AttentionBackend = ReferenceBackend()
    if chosen in ("triton", "flashinfer"):
        backend = tried_backend(chosen, loaded, block_size)
    elif chosen == "cpu":
        from kvcpu.attention.backend import CpuBackend

        threads = torch.get_num_threads()
        backend = CpuBackend(threads)
        before = trial_logits(loaded, block_size)
        optimise(loaded.model, threads, lambda: trial_logits(loaded, block_size))
        _check_unchanged(loaded, before, trial_logits(loaded, block_size, backend))
    runner = TorchRunner(loaded, backend, blocks, block_size)
    runner.pool.reach(0)
    sampler.warm_up(loaded.device)
    log.info("%s attention on %s", backend.name, loaded.device)
    if loaded.device.type == "cuda":
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
            if count == 1:
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
