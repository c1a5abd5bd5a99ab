"""What every rank of a group does alike, at the same time: join the group, load its part of the model, agree on blocks.

Ranks run the same collective operations in the same order, from the first forward pass of `probe` on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from kvfleet.worker.model.assembly import build_runner, with_kv_dtype
from kvfleet.worker.model.attention.choice import backend_for
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.gpu.memory_profile import meter_of, step_bytes
from kvfleet.worker.model.kv_pool import blocks_that_fit, free_bytes
from kvfleet.worker.model.load_progress import LoadProgress
from kvfleet.worker.model.loader import LoadedModel, device_of, load_model, read_config
from kvfleet.worker.model.parallel.messages import Begin, RankPlan
from kvfleet.worker.model.parallel.sharding import UNCUT, RankPart
from kvfleet.worker.model.probe import layout_of
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.model.support import refusal, supported_context
from kvproto.errors import OutOfMemory
from kvsampling.sampler import is_out_of_memory

# Of a collective operation: one rank may load for long after the other. `RankGroup` watches the time of steps.
COLLECTIVE_LIMIT = timedelta(hours=2)


def build_rank(
    begin: Begin,
    make: Callable[..., TorchRunner],
    told: Callable[[LoadedModel, int], Any],
    progress: LoadProgress | None = None,
) -> TorchRunner:
    """`told` hears of the model and the number of blocks. Raises UnsupportedModel, InvalidRequest or OutOfMemory."""
    plan = begin.plan
    torch.set_num_threads(plan.threads)
    disable_progress_bar()
    _join(begin)
    loaded = _load(plan, begin.rank, progress)
    backend = backend_for(plan.attention, loaded, plan.block_size)
    blocks = _blocks(loaded, plan, backend)
    told(loaded, blocks)
    size, attention = plan.block_size, plan.attention
    return build_runner(loaded, blocks, size, attention, make=make, progress=progress, backend=backend)


def _join(begin: Begin) -> None:
    plan = begin.plan
    cuda = device_of(plan.device).type == "cuda"
    if cuda:
        torch.cuda.set_device(begin.rank)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # else they listen where other hosts may reach them
        os.environ.setdefault(name, "lo")
    store = dist.FileStore(str(begin.meeting), plan.ranks)  # type: ignore[attr-defined]
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=begin.rank, world_size=plan.ranks, timeout=COLLECTIVE_LIMIT)


def _load(plan: RankPlan, rank: int, progress: LoadProgress | None) -> LoadedModel:
    config = read_config(plan.folder)
    part = RankPart(rank, plan.ranks)
    try:
        loaded = load_model(
            plan.folder, load_format=plan.load_format, dtype=plan.dtype, device=plan.device, part=part,
            progress=progress,
        )  # fmt: skip
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"a part of the model does not fit: {error}") from error
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise  # another rank is gone
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refusal(config, f"its tensor-parallel plan over {plan.ranks} processes ({why})", UNCUT) from error
    heads = layout_of(config, supported_context(config)).kv_heads
    if loaded.kv_shape.kv_heads * plan.ranks != heads:
        raise refusal(config, "a tensor-parallel plan that leaves attention whole", UNCUT)
    return replace(with_kv_dtype(loaded, plan.kv_dtype, plan.block_size), ranks=plan.ranks)


def _blocks(loaded: LoadedModel, plan: RankPlan, backend: AttentionBackend) -> int:
    """The least that fits on any rank."""
    device, size = loaded.device, plan.block_size
    blocks = plan.blocks
    if blocks is None:
        steps = step_bytes(
            lambda blocks: TorchRunner(loaded, backend, blocks, size),
            meter_of(device), plan.step_tokens, plan.slots, in_parts=False,  # other ranks would not know
        )  # fmt: skip
        fit = blocks_that_fit(loaded.kv_shape, size, device, plan.share, max(steps))
        least = torch.tensor([fit], device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        blocks = int(least)
    wanted = blocks * loaded.kv_shape.bytes_per_block(size) * (plan.ranks if device.type == "cpu" else 1)
    if wanted > free_bytes(device):
        raise OutOfMemory(f"{blocks} KV blocks need more than the {free_bytes(device):,} bytes that are free")
    return blocks
