"""Wiring: settings and a model folder to an engine. The one place that decides between the fake and the real model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tokenizers import Tokenizer

from kvfleet.worker.blocks import block_codec
from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.chain_location import StateForm
from kvfleet.worker.blocks.state_slots import StateSlots
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.eviction.base import EvictionPolicy
from kvfleet.worker.eviction.reuse import ReuseEviction
from kvfleet.worker.model.base import BlockMemory, ModelRunner
from kvfleet.worker.model.fake import FakePace, FakeRunner
from kvfleet.worker.model.kv_size import KvLayout, size_lines
from kvfleet.worker.model.load_progress import LoadProgress
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.text.detokenizer import Detokenizer
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.host_states import HostStates
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.errors import OutOfMemory
from kvproto.messages import Bundle
from kvservice.byte_size import readable
from kvservice.host import cores
from kvservice.host import free_bytes as host_bytes_free

log = logging.getLogger(__name__)

FAKE_BLOCKS = 8192
TORCH_MODULES = ("kvfleet.worker.model.loader", "kvfleet.worker.model.assembly", "kvcpu.attention.backend")


def build_engine(
    settings: WorkerSettings,
    folder: Path,
    bundle: Bundle,
    remote_for: Callable[[BlockMemory, StateForm | None], RemoteTiers] | None = None,
    progress: LoadProgress | None = None,
) -> Engine:
    """Load the model, which blocks, and build its engine. `remote_for` makes the client of vaults and peers; `progress`
    is told. Raises UnsupportedModel, InvalidRequest or OutOfMemory."""
    progress = progress or LoadProgress()
    runner = _fake_runner(settings, bundle) if settings.runner == "fake" else _torch_runner(settings, folder, progress)
    progress.doing = "reserving memory for blocks"
    policy: EvictionPolicy | None = None
    if settings.eviction == "reuse":
        policy = ReuseEviction(
            runner.num_blocks,
            runner.block_size,
            lambda position, tokens: scheduler.pacer.times.prompt_seconds(position, tokens),
        )
    pool = BlockPool(runner.num_blocks, runner.block_size, policy)
    if runner.num_blocks * runner.block_size < runner.context_length:
        log.warning(
            "%d blocks hold %d tokens, less than the model's context of %d: longer requests fail as out of memory",
            runner.num_blocks,
            runner.num_blocks * runner.block_size,
            runner.context_length,
        )
    scheduler = Scheduler(
        pool,
        token_budget=settings.step_tokens,
        slots=settings.slots,
        itl_target_s=settings.itl_target_ms / 1000,
        window=runner.window,
        states=_state_slots(settings, runner),
    )
    host = _host_tier(settings, runner)
    states = _host_states(settings, runner, scheduler.tables.slots, host)
    remote, form = None, None if states is None else states.form
    if remote_for is not None and runner.window is None and bool(runner.num_states) == (form is not None):
        block_codec.warm_up()
        remote = remote_for(runner.memory, form)
    tiers = Tiers(pool, runner.memory, host, remote, states=states)
    detokenizer = Detokenizer(Tokenizer.from_str(bundle.tokenizer_json))
    return Engine(runner, pool, scheduler, detokenizer, tiers=tiers)


def _host_tier(settings: WorkerSettings, runner: ModelRunner) -> HostTier:
    size = settings.host_bytes
    if runner.window is not None:
        log.info("every layer attends to a window: blocks are kept on the device alone")
        size = 0
    elif size is None and settings.runner == "fake":
        size = FAKE_BLOCKS * runner.bytes_per_block
    elif size is None:
        size = int(host_bytes_free() * settings.host_memory_fraction / settings.workers_on_host)
    size -= size % runner.bytes_per_block
    memory = memoryview(b"")
    if size:
        blocks = size // runner.bytes_per_block
        log.info("%s of host memory for %d blocks below the device", readable(size), blocks)
        memory = runner.memory.host_memory(size)
    return HostTier(memory, runner.bytes_per_block, runner.block_size)


def _state_slots(settings: WorkerSettings, runner: ModelRunner) -> StateSlots | None:
    if not runner.num_states:
        return None
    hands_over = settings.role == "prefill"
    return StateSlots(runner.num_states, runner.block_size, settings.state_every, at_prompt_ends=hands_over)


def _host_states(
    settings: WorkerSettings, runner: ModelRunner, slots: StateSlots | None, host: HostTier
) -> HostStates | None:
    if slots is None or runner.state_memory is None or not host.blocks:
        return None
    size = settings.host_state_bytes
    size = host.blocks * host.block_bytes // 3 if size is None else size
    size -= size % runner.state_memory.block_bytes
    memory = runner.memory.host_memory(size) if size else memoryview(b"")
    log.info("%s of host memory for %d snapshots", readable(size), size // runner.state_memory.block_bytes)
    return HostStates(slots, runner.state_memory, memory)


def _fake_runner(settings: WorkerSettings, bundle: Bundle) -> ModelRunner:
    return FakeRunner(
        num_blocks=settings.blocks or FAKE_BLOCKS,
        block_size=settings.block_size,
        vocab_size=bundle.vocab_size,
        context_length=bundle.context_length,
        eos_ids=bundle.stop_ids,
        num_states=settings.states or 0,
        pace=FakePace(settings.fake_tokens_per_s or None, settings.fake_prefill_tokens_per_s or None),
    )


def import_torch() -> None:
    """Takes seconds, once in a process."""
    from kvfleet.worker.model.quick_imports import defer_compiler, keep_scan

    keep_scan()
    defer_compiler()
    for module in TORCH_MODULES:
        import_module(module)


def _torch_runner(settings: WorkerSettings, folder: Path, progress: LoadProgress) -> ModelRunner:
    progress.doing = "importing torch"
    import_torch()
    import torch
    from transformers.utils.logging import disable_progress_bar

    from kvfleet.worker.model.assembly import build_runner, with_kv_dtype
    from kvfleet.worker.model.attention.choice import backend_for
    from kvfleet.worker.model.gpu.memory_profile import meter_of, step_bytes
    from kvfleet.worker.model.kv_pool import blocks_that_fit, free_bytes, share_of_free, states_that_fit
    from kvfleet.worker.model.loader import load_model
    from kvfleet.worker.model.runner import TorchRunner

    threads = settings.threads or max(1, cores() // settings.workers_on_host)
    if settings.tensor_parallel_size > 1:
        return _group_runner(settings, folder, threads, progress)
    torch.set_num_threads(threads)
    disable_progress_bar()  # several workers share one terminal
    loaded = load_model(
        folder, load_format=settings.load_format, dtype=settings.dtype, device=settings.device, progress=progress
    )
    loaded = with_kv_dtype(loaded, settings.kv_dtype, settings.block_size)
    graphs = 0 if settings.enforce_eager else settings.slots
    blocks, backend = settings.blocks, None
    if blocks is None:
        progress.doing = "measuring the memory of a step"
        backend = backend_for(settings.attention, loaded, settings.block_size)
        prompt, decodes = step_bytes(
            lambda blocks: TorchRunner(loaded, backend, blocks, settings.block_size),
            meter_of(loaded.device), settings.step_tokens, settings.slots,
        )  # fmt: skip
        step = max(prompt, decodes) + (decodes if graphs else 0)
        share = share_of_free(settings.kv_memory_fraction, loaded.device, settings.workers_on_host)
        blocks = blocks_that_fit(loaded.kv_shape, settings.block_size, loaded.device, share, step)
    shape, states = loaded.kv_shape, 0
    if loaded.states is not None:
        per_block, per_state = shape.bytes_per_block(settings.block_size), loaded.states.nbytes
        states = settings.states or states_that_fit(per_state, blocks * per_block, settings.slots)
        if settings.blocks is None:
            blocks = max(1, blocks - -(-states * per_state // per_block))
        log.info("%d recurrent states of %s: %s", states, readable(per_state), readable(states * per_state))
    if blocks * shape.bytes_per_block(settings.block_size) > free_bytes(loaded.device):
        raise OutOfMemory(f"{blocks} KV blocks need more than the {readable(free_bytes(loaded.device))} that are free")
    layout = KvLayout(shape.layers, shape.kv_heads, shape.head_dim, loaded.context_length, loaded.window, shape.parts)
    kv_dtype = "int8" if shape.quantized else str(shape.dtype).removeprefix("torch.")
    for line in size_lines(layout, settings.block_size, kv_dtype, blocks):
        log.info(line)
    log.info("%s, %d threads", loaded.device, threads)
    return build_runner(
        loaded, blocks, settings.block_size, settings.attention, graphs, progress=progress, backend=backend,
        states=states,
    )  # fmt: skip


def _group_runner(settings: WorkerSettings, folder: Path, threads: int, progress: LoadProgress) -> ModelRunner:
    from kvfleet.worker.model.kv_pool import share_of_free
    from kvfleet.worker.model.loader import device_of
    from kvfleet.worker.model.parallel.launch import start_group
    from kvfleet.worker.model.parallel.messages import RankPlan

    ranks = settings.tensor_parallel_size
    sharing = settings.workers_on_host * ranks
    return start_group(
        RankPlan(
            ranks,
            folder,
            settings.load_format,
            settings.dtype,
            settings.device,
            settings.kv_dtype,
            settings.block_size,
            settings.step_tokens,
            settings.blocks,
            share_of_free(settings.kv_memory_fraction, device_of(settings.device), sharing),
            settings.slots,
            settings.attention,
            max(1, threads // ranks),
        ),
        progress=progress,
    )
