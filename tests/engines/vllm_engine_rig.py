"""A vLLM server's engine as a worker builds it, beside a double of the server."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from rigs import BLOCK_SIZE, EngineRig, Recorder
from tokenizers import Tokenizer

from kvfleet.worker.engine.bundle import read_bundle
from tests.support.vllm_beside import Beside
from tests.support.vllm_double.server import VllmDouble, made


async def double(folder: Path, slots: int) -> EngineRig:
    """Blocks of the double are twice ours."""
    bundle = read_bundle(folder, "demo", load_format="auto", dtype="auto", block_size=BLOCK_SIZE)
    tokenizer, recorder = Tokenizer.from_str(bundle.tokenizer_json), Recorder()
    server = await VllmDouble(made(folder, slots=slots)).start()
    sockets = Path(tempfile.mkdtemp(prefix="kvfleet-"))
    beside = await Beside.start(server.url, sockets, tokenizer, bundle.stop_ids, recorder.take)

    async def stop() -> None:
        await beside.stop()
        await server.die()
        shutil.rmtree(sockets)

    return EngineRig(beside.engine, recorder, tokenizer, bundle.vocab_size, bundle.stop_ids, stop, has_kv=False)
