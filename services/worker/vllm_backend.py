"""Wiring of a worker beside a vLLM server."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.registry import Collector
from tokenizers import Tokenizer

from kvfleet.worker.backend import Backend, Served, WorkerProcess, prompt_encoder_of
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.model.model_folder import resolve_model
from kvfleet.worker.network.successors import Successors
from kvfleet.worker.port.engine_counters import EngineCounters
from kvfleet.worker.port.engine_port import EngineFacts
from kvfleet.worker.serve.loop import WorkerLoop
from kvfleet.worker.serve.worker_parts import WorkerParts
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.text.detokenizer import Detokenizer
from kvfleet.worker.vllm.live_vllm_sequences import LiveVllmSequences, VllmModel
from kvfleet.worker.vllm.no_tiers import NoTiers
from kvfleet.worker.vllm.server_facts import ServerFacts
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet.worker.vllm.vllm_engine import VllmEngine
from kvfleet.worker.vllm.vllm_sequence import Sockets
from kvfleet.worker.vllm.vllm_server import Expected, VllmServer
from kvfleet.worker.vllm_metrics import VllmMetrics, vllm_readings
from kvproto.errors import InvalidRequest
from kvproto.members import Lease
from kvproto.messages import Bundle, WorkerRecord
from kvservice import lifecycle
from kvservice.data_plane import runtime_folder
from kvservice.metrics import Reading


def bundle_of(settings: WorkerSettings, folder: Path, facts: ServerFacts) -> Bundle:
    """Raises InvalidRequest for another model than vLLM's."""
    bundle = read_bundle(
        folder, facts.name, load_format=settings.load_format, dtype=settings.dtype, block_size=settings.block_size
    )
    theirs = Path(facts.model) / "config.json"
    if theirs.is_file() and json.loads(theirs.read_text()) != json.loads((folder / "config.json").read_text()):
        raise InvalidRequest(f"{settings.model} is another model than vLLM's, {facts.model}", field="model")
    return replace(bundle, context_length=facts.context_length, vocab_size=facts.vocab_size)


@dataclass(eq=False)
class VllmBackend(Backend):
    process: WorkerProcess

    async def find(self) -> Served:
        settings, life = self.process.settings, self.process.life
        if settings.public_prefixes_file is not None:
            raise InvalidRequest("vLLM workers share no cache among tenants", field="public_prefixes_file")
        folder = runtime_folder(settings, life)
        sockets = Sockets(str(folder / f"{settings.member}.news"), str(folder / f"{settings.member}.draws"))
        wanted = Expected(settings.block_size, settings.served_model_name, settings.dtype)
        self._server = VllmServer(TokenRoutes(settings.engine_url), sockets, wanted, life.fatal)
        await self._server.open()
        life.closing("vLLM", self._server.close)
        self._facts = facts = await self._server.find()
        model = settings.model if "model" in settings.model_fields_set else facts.model
        self._bundle = bundle_of(settings, await lifecycle.in_daemon_thread(lambda: resolve_model(model)), facts)
        return Served(self._bundle, facts.slots)

    async def load(self, record: WorkerRecord) -> None:
        """vLLM has it."""

    def assemble(self, lease: Lease) -> WorkerLoop:
        one, facts, bundle, server = self.process, self._facts, self._bundle, self._server
        assert isinstance(lease.record, WorkerRecord)
        tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        ratio = facts.block_size // one.settings.block_size
        engine_facts = EngineFacts(facts.blocks * ratio, facts.block_bytes // ratio, b"")
        live = LiveVllmSequences(
            VllmModel(
                facts.name, facts.context_length, facts.vocab_size, bundle.stop_ids, facts.slots, engine_facts.blocks
            ),
            server.blocks,
            Detokenizer(tokenizer),
            EngineCounters(),
        )
        self._engine = engine = VllmEngine(
            live,
            engine_facts,
            server,
            on_result=lambda results: worker.on_results(results),
            on_state=lambda: changed(),
            prefix=f"{lease.record.epoch}-",
        )
        lease.record = replace(
            lease.record,
            blocks=engine_facts.blocks,
            block_bytes=engine_facts.block_bytes,
            engine_pid=server.engine_pid,
        )
        parts = WorkerParts(
            one.settings, one.connection, one.subjects, lease, engine, NoTiers(), bundle, prompt_encoder_of(tokenizer),
            one.tracer,
        )  # fmt: skip
        self._successors = Successors(one.connection, one.subjects, lease.record)
        parts.somebody_is_ready = self._successors.somebody_is_ready
        worker = WorkerLoop(parts, one.life.fatal, one.life.stop)

        def changed() -> None:
            worker.record = replace(worker.record, engine_pid=server.engine_pid)
            worker.on_state()

        return worker

    async def start(self, worker: WorkerLoop) -> None:
        self._server.watch(self._engine)

    async def stop(self) -> None:
        await self._successors.stop()
        await self._engine.stop()

    def readings(self, worker: WorkerLoop) -> list[Reading]:
        return vllm_readings(worker, self._server)

    def collectors(self) -> list[Collector]:
        return [VllmMetrics(self._server.routes)]
