"""A loaded model becomes a runner: which attention, which numbers its KV is kept in, how many threads."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

import torch

from kvproto.errors import InvalidRequest, UnsupportedModel
from services.worker.model import sampler
from services.worker.model.attention.base import AttentionBackend
from services.worker.model.attention.reference import ReferenceBackend
from services.worker.model.kv_pool import SCALE_BYTES
from services.worker.model.loader import LoadedModel
from services.worker.model.optimise import optimise
from services.worker.model.runner import TorchRunner

log = logging.getLogger(__name__)

Attention = Literal["auto", "cpu", "reference"]
KvDtype = Literal["auto", "int8"]


def with_kv_dtype(loaded: LoadedModel, kv_dtype: KvDtype, block_size: int) -> LoadedModel:
    """The model with its KV kept as asked. Raises UnsupportedModel where int8 runs would not be aligned."""
    if kv_dtype == "auto":
        return loaded
    if loaded.kv_shape.head_dim * block_size % SCALE_BYTES:
        raise UnsupportedModel(
            f"an int8 KV cache with a head_dim of {loaded.kv_shape.head_dim} and blocks of {block_size} tokens "
            "is not supported: their product must be a multiple of 4",
            field="kv_dtype",
        )
    return replace(loaded, kv_shape=replace(loaded.kv_shape, quantized=True))


def build_runner(loaded: LoadedModel, blocks: int, block_size: int, attention: Attention = "auto") -> TorchRunner:
    """A runner that is as fast as this machine allows, on as many threads as torch has; compiles what must be compiled.

    `reference` leaves the model as transformers made it. Raises InvalidRequest if the attention cannot run here, and
    OutOfMemory if the KV pool does not fit.
    """
    if attention == "cpu" and loaded.device.type != "cpu":
        raise InvalidRequest(f"the cpu attention cannot run on {loaded.device}", field="attention")
    on_cpu = attention != "reference" and loaded.device.type == "cpu"
    backend: AttentionBackend = ReferenceBackend()
    if on_cpu:
        from services.worker.model.attention.cpu.backend import CpuBackend  # numba takes time to import

        threads = torch.get_num_threads()
        backend = CpuBackend(threads)
        optimise(loaded.model, threads)
    runner = TorchRunner(loaded, backend, blocks, block_size)
    sampler.warm_up(loaded.device)
    log.info("%s attention on %s", backend.name, loaded.device)
    return runner
