"""A real vLLM server's engine, wired as a worker wires it. The servers live for a session, an engine for one test."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from rigs import BLOCK_SIZE, CONTEXT, EngineRig, Recorder
from tokenizers import Tokenizer

from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.vllm.engine_beside import engine_beside
from kvfleet.worker.vllm.result_queue import ResultQueue
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet.worker.vllm.vllm_sequence import Sockets
from kvfleet.worker.vllm.vllm_server import Expected
from kvfleet.worker.vllm.vllm_server import VllmServer as VllmSide
from tests.support.vllm_server import PACED, VllmServer
from tests.support.waiting import LIMIT_S

_servers: dict[int, VllmServer] = {}  # by how many sequences they run at once
_lives = count()


@dataclass(eq=False)
class RealRig(EngineRig):
    routes: TokenRoutes = field(kw_only=True)

    async def obeyed(self) -> None:
        """What it was told goes over HTTP."""
        await super().obeyed()
        load = self.engine.measured[0]
        async with asyncio.timeout(LIMIT_S):
            while await self._requests() < load.running + load.waiting:
                await asyncio.sleep(0.01)

    async def _requests(self) -> float:
        shown = (await self.routes.get("/metrics")).decode()
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", shown, re.MULTILINE)
        return sum(map(float, found))


async def start(folder: Path, slots: int) -> EngineRig:
    return await beside(_server(folder, slots).url, folder)


def stop_servers() -> None:
    while _servers:
        _servers.popitem()[1].stop()


def _server(folder: Path, slots: int) -> VllmServer:
    if slots not in _servers:
        flags = ("--max-model-len", str(CONTEXT), "--max-num-seqs", str(slots), "--num-gpu-blocks-override", "256")
        _servers[slots] = VllmServer(folder, folder.parent, *flags, *PACED, name="demo")
    return _servers[slots].wait_ready()


async def beside(url: str, folder: Path) -> EngineRig:
    bundle = read_bundle(folder, "demo", load_format="auto", dtype="auto", block_size=BLOCK_SIZE)
    tokenizer, recorder = Tokenizer.from_str(bundle.tokenizer_json), Recorder()
    sockets = Path(tempfile.mkdtemp(prefix="kvfleet-"))
    fatal: list[str] = []
    side = VllmSide(
        TokenRoutes(url), Sockets(str(sockets / "n"), str(sockets / "d")), Expected(BLOCK_SIZE, None, "auto"),
        fatal.append,
    )  # fmt: skip
    await side.open()
    facts = await side.find()
    engine = engine_beside(
        side, facts, tokenizer, bundle.stop_ids, ResultQueue(recorder.take), lambda: None, f"life{next(_lives)}-"
    )
    side.watch(engine)

    async def stop() -> None:
        await engine.stop()
        await side.close()
        shutil.rmtree(sockets)
        assert not fatal

    return RealRig(
        engine, recorder, tokenizer, bundle.vocab_size, bundle.stop_ids, stop, has_kv=False, routes=side.routes
    )
