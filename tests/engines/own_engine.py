"""The own engine in its thread, built as a worker builds it: on the fake runner, or on torch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal
from unittest.mock import patch

from rigs import BLOCK_SIZE, EngineRig, Recorder
from tokenizers import Tokenizer

from kvfleet.worker.engine import engine_factory
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.model.base import ModelRunner
from kvfleet.worker.model.load_progress import LoadProgress
from kvfleet.worker.settings import WorkerSettings

HOST_BYTES = 8 * 1024 * 1024
FAKE_TOKENS_PER_S = 500.0  # a long sequence outlives what a test does to it

_load = engine_factory._torch_runner
_loaded: dict[Path, ModelRunner] = {}


def _runner(settings: WorkerSettings, folder: Path, progress: LoadProgress) -> ModelRunner:
    """The model is loaded once: that takes longer than most tests. Every engine has a pool of its own."""
    if folder not in _loaded:
        _loaded[folder] = _load(settings, folder, progress)
    return _loaded[folder]


async def fake(folder: Path, slots: int) -> EngineRig:
    return await _start(folder, slots, "fake")


async def torch(folder: Path, slots: int) -> EngineRig:
    return await _start(folder, slots, "torch")


async def torch_overlapping(folder: Path, slots: int) -> EngineRig:
    """As on a GPU: a step's text is made in the next one."""
    return await _start(folder, slots, "torch", overlaps=True)


async def _start(folder: Path, slots: int, runner: Literal["fake", "torch"], *, overlaps: bool = False) -> EngineRig:
    settings = WorkerSettings(
        runner=runner,
        fake_tokens_per_s=FAKE_TOKENS_PER_S,
        device="cpu",
        block_size=BLOCK_SIZE,
        blocks=256,
        host_bytes=HOST_BYTES,
        slots=slots,
        threads=1,
    )
    bundle = read_bundle(folder, "demo", load_format="auto", dtype="auto", block_size=BLOCK_SIZE)
    with patch.object(engine_factory, "_torch_runner", _runner):
        engine = engine_factory.build_engine(settings, folder, bundle)
    engine.runner.overlaps = overlaps
    loop, recorder = asyncio.get_running_loop(), Recorder()
    thread = EngineThread(engine, recorder.take, loop)
    engine.tiers.wake = thread.wake

    async def stop() -> None:
        await loop.run_in_executor(None, thread.stop)
        await loop.run_in_executor(None, engine.tiers.close)

    thread.start()
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
    return EngineRig(thread, recorder, tokenizer, bundle.vocab_size, bundle.stop_ids, stop)
