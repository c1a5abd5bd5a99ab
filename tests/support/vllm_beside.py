"""A worker's side of a vLLM server without NATS: server, engine and what they tell, wired as in `vllm_backend`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from kvfleet.worker.port.engine_counters import EngineCounters
from kvfleet.worker.port.engine_port import EngineFacts
from kvfleet.worker.port.outputs import StepResult
from kvfleet.worker.text.detokenizer import Detokenizer
from kvfleet.worker.vllm.live_vllm_sequences import LiveVllmSequences, VllmModel
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet.worker.vllm.vllm_engine import VllmEngine
from kvfleet.worker.vllm.vllm_sequence import Sockets
from kvfleet.worker.vllm.vllm_server import Expected, VllmServer

USUAL = Expected(16, None, "auto")


def server_at(url: str, folder: Path, fatal: list[str], wanted: Expected = USUAL) -> VllmServer:
    """Not opened yet."""
    return VllmServer(TokenRoutes(url), Sockets(str(folder / "n"), str(folder / "d")), wanted, fatal.append)


@dataclass(eq=False)
class Beside:
    server: VllmServer
    engine: VllmEngine
    fatal: list[str]
    states: list[bool] = field(default_factory=list)  # whether it was ready, at each change

    @classmethod
    async def start(
        cls,
        url: str,
        folder: Path,
        tokenizer: Tokenizer,
        stop_ids: tuple[int, ...],
        take: Callable[[list[StepResult]], None],
        wanted: Expected = USUAL,
    ) -> Beside:
        fatal: list[str] = []
        server = server_at(url, folder, fatal, wanted)
        await server.open()
        facts = await server.find()
        ratio = facts.block_size // wanted.block_size
        engine_facts = EngineFacts(facts.blocks * ratio, facts.block_bytes // ratio, b"")
        model = VllmModel(
            facts.name, facts.context_length, facts.vocab_size, stop_ids, facts.slots, engine_facts.blocks
        )
        live = LiveVllmSequences(model, server.blocks, Detokenizer(tokenizer), EngineCounters())
        states: list[bool] = []
        engine = VllmEngine(
            live, engine_facts, server, on_result=take, on_state=lambda: states.append(engine.is_ready), prefix="e-"
        )
        server.watch(engine)
        return cls(server, engine, fatal, states)

    async def stop(self) -> None:
        await self.engine.stop()
        await self.server.close()
