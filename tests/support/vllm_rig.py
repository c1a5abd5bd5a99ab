"""A worker's side of a vLLM server without NATS, wired as in `vllm_backend`, beside a double of the server."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.vllm.engine_beside import engine_beside
from kvfleet.worker.vllm.result_queue import ResultQueue
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet.worker.vllm.vllm_sequence import Sockets
from kvfleet.worker.vllm.vllm_server import Expected, VllmServer
from kvproto.errors import KvfleetError
from tests.engines.rigs import BLOCK_SIZE, EngineRig, Recorder
from tests.support.vllm_double.server import VllmDouble, made

USUAL = Expected(BLOCK_SIZE, None, "auto")


def server_at(url: str, folder: Path, fatal: list[str], wanted: Expected = USUAL) -> VllmServer:
    """Not opened yet."""
    return VllmServer(TokenRoutes(url), Sockets(str(folder / "n"), str(folder / "d")), wanted, fatal.append)


@dataclass(eq=False)
class VllmRig(EngineRig):
    double: VllmDouble = field(kw_only=True)
    server: VllmServer = field(kw_only=True)
    fatal: list[str] = field(kw_only=True)
    states: list[bool] = field(kw_only=True)  # whether it was ready, at each change

    async def forgets(self) -> None:
        """Until vLLM was told to forget what was cancelled."""
        await self.engine.inspect(self.root, (0,))


Starts = Callable[..., Awaitable[VllmRig]]


async def start(folder: Path = DEMO_FOLDER, root: bytes | None = None, **more: Any) -> VllmRig:
    """`more` says how the double is made. Its blocks are twice ours."""
    bundle = read_bundle(folder, "demo", load_format="auto", dtype="auto", block_size=BLOCK_SIZE)
    tokenizer, recorder = Tokenizer.from_str(bundle.tokenizer_json), Recorder()
    double = await VllmDouble(made(folder, **more)).start()
    sockets = Path(tempfile.mkdtemp(prefix="kvfleet-"))
    fatal: list[str] = []
    server = server_at(double.url, sockets, fatal)
    await server.open()
    try:
        facts = await server.find()
    except KvfleetError:
        await server.close()
        await double.die()
        raise
    states: list[bool] = []
    engine = engine_beside(
        server, facts, tokenizer, bundle.stop_ids, ResultQueue(recorder.take),
        lambda: states.append(engine.is_ready), "e-",
    )  # fmt: skip
    server.watch(engine)
    states.clear()

    async def stop() -> None:
        await engine.stop()
        await server.close()
        await double.die()
        shutil.rmtree(sockets)

    return VllmRig(
        engine, recorder, tokenizer, bundle.vocab_size, bundle.stop_ids, stop, has_kv=False,
        root=root or os.urandom(16), double=double, server=server, fatal=fatal, states=states,
    )  # fmt: skip


async def of_slots(folder: Path, slots: int) -> EngineRig:
    return await start(folder, slots=slots)
