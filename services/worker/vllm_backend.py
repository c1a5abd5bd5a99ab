"""Wiring of a worker beside a vLLM server."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prometheus_client.registry import Collector
from tokenizers import Tokenizer

from kvfleet.worker.backend import Backend, Served, WorkerProcess
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.model.base import BlockFormat
from kvfleet.worker.model.model_folder import resolve_model
from kvfleet.worker.network.lending import HostLender
from kvfleet.worker.network.successors import Successors
from kvfleet.worker.network.tier_network import TierNetwork
from kvfleet.worker.serve.demand import preload
from kvfleet.worker.serve.loop import WorkerLoop
from kvfleet.worker.serve.worker_parts import WorkerParts
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.text.model_text import ModelText
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.vllm.engine_beside import engine_beside
from kvfleet.worker.vllm.host_fetch import soon
from kvfleet.worker.vllm.no_tiers import NoTiers, StoreTiers
from kvfleet.worker.vllm.restore_checks import RestoreChecks
from kvfleet.worker.vllm.result_queue import ResultQueue
from kvfleet.worker.vllm.server_facts import MovedFormat, ServerFacts
from kvfleet.worker.vllm.shared_slots import SHARED, SharedMemory, SharedSlots
from kvfleet.worker.vllm.state_links import StateLinks, form_of
from kvfleet.worker.vllm.state_records import StateRecords
from kvfleet.worker.vllm.step_rates import StepRates
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet.worker.vllm.vllm_sequence import Sockets
from kvfleet.worker.vllm.vllm_server import Expected, VllmServer
from kvfleet.worker.vllm.vllm_tiers import VllmTiers
from kvfleet.worker.vllm_metrics import VllmMetrics, vllm_readings
from kvproto.errors import InvalidRequest
from kvproto.ids import new_process_id
from kvproto.members import Lease
from kvproto.messages import Bundle, Loading, WorkerRecord
from kvservice import lifecycle
from kvservice.byte_size import readable
from kvservice.data_plane import runtime_folder
from kvservice.host import free_bytes
from kvservice.metrics import Reading

log = logging.getLogger(__name__)

SHARED_SHARE = 0.9  # of what is free there


@dataclass(slots=True)
class OpaqueFormat(BlockFormat):
    """Blocks of vLLM's as vaults know them: bytes of a format, whatever they mean."""

    kv_format: bytes
    rows: tuple[int, int, str]


def _slots(settings: WorkerSettings, nbytes: int) -> int:
    """As many blocks as the settings leave room for, in what shared memory there is."""
    size = settings.host_bytes
    if size is None:
        size = int(free_bytes() * settings.host_memory_fraction / settings.workers_on_host)
    return min(size, int(SHARED_SHARE * shutil.disk_usage(SHARED).free)) // nbytes


def bundle_of(settings: WorkerSettings, folder: Path, facts: ServerFacts) -> Bundle:
    """Raises InvalidRequest for another model than vLLM's."""
    bundle = read_bundle(
        folder,
        facts.name,
        load_format=settings.load_format,
        dtype=settings.dtype,
        block_size=settings.block_size,
        tool_format=settings.tool_format or "",
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
        if settings.vault_codec != "raw":
            raise InvalidRequest("vLLM's blocks are written as they are: raw", field="vault_codec")
        if settings.eviction != "lru":
            raise InvalidRequest("vLLM evicts its blocks by itself, by least recent use", field="eviction")
        self._runtime = folder = runtime_folder(settings, life)
        # What vLLM was told in an earlier life, or is told by another worker, must not lead here.
        self._life = new_process_id()
        sockets = Sockets(str(folder / f"{self._life}.news"), str(folder / f"{self._life}.draws"))
        wanted = Expected(settings.block_size, settings.served_model_name, settings.dtype)
        self._server = VllmServer(TokenRoutes(settings.engine_url), sockets, wanted, life.fatal)
        await self._server.open()
        life.closing("vLLM", self._server.close)
        self._facts = facts = await self._server.find()
        model = settings.model if "model" in settings.model_fields_set else facts.model
        folder = await lifecycle.in_daemon_thread(lambda: resolve_model(model))
        self._bundle = bundle_of(settings, folder, facts)
        self._server.adapters.model = json.loads((folder / "config.json").read_text())
        return Served(self._bundle, facts.slots, self._server.adapters.loaded)

    async def load(self, record: WorkerRecord) -> None:
        """vLLM has the model; here is what lies below it."""
        facts, settings, process = self._facts, self.process.settings, self.process
        self._network = TierNetwork(settings, record.id, record.host, self._runtime, process.tracer)
        self._rates = StepRates()
        self._tiers: StoreTiers = NoTiers()
        self._lender: HostLender | None = None
        if facts.moved is None:
            log.info("vLLM's blocks of this layout are kept on its device alone")
        elif facts.block_size != settings.block_size:
            # A part of a block's bytes holds something of all its tokens, so it must not go by the hash of its own.
            log.info(
                "vLLM's blocks of %d tokens are kept on its device alone, unless --block-size says so too",
                facts.block_size,
            )
        elif slots := _slots(settings, facts.moved.nbytes):
            self._tiers = await self._tiers_of(facts.moved, slots)

    def loading(self) -> Loading | None:
        return None

    async def _tiers_of(self, moved: MovedFormat, slots: int) -> VllmTiers:
        settings, facts, size = self.process.settings, self._facts, slots * moved.nbytes
        log.info("%s of host memory for %d blocks below vLLM", readable(size), slots)
        memory = await lifecycle.in_daemon_thread(lambda: SharedMemory.of_life(self._life, size))
        self.process.life.closing("shared memory", memory.closed)
        store = SharedSlots(
            memory,
            HostTier(memory.view, moved.nbytes, settings.block_size),
            moved.ranks,
            self._server.news.grant,
            lambda changes: self._engine.on_changes(changes),
        )
        blocks = OpaqueFormat(moved.name, (moved.nbytes // 4, 1, "float32"))
        remote, states, form = None, None, None
        if facts.has_states:
            store.states = StateRecords(store.host.pool)
            form = form_of(moved.name, facts.state_slots, moved.nbytes)
        if store.states is None or form is not None:  # else blocks alone are of no use to others
            remote, self._lender = self._network.remote_for(blocks, form), HostLender(store.host, blocks)
            if store.states is not None and form is not None:
                states = StateLinks(store.states, store.host, remote, form)
                self._lender.states = states.lendable
        return VllmTiers(
            store, self._server.blocks, self._rates, remote, self._network.meet, settings.fleet_key.encode(),
            RestoreChecks(facts.dtype if facts.cache_dtype == "auto" else facts.cache_dtype),
            lambda block: self._engine.discard(block), self._lender.lent if self._lender is not None else None, states,
            saves_all=settings.role == "prefill", tells_all=len(facts.groups) <= 1,
        )  # fmt: skip

    def assemble(self, lease: Lease) -> WorkerLoop:
        one, facts, bundle, server = self.process, self._facts, self._bundle, self._server
        assert isinstance(lease.record, WorkerRecord)
        tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        results = ResultQueue(lambda results: worker.on_results(results))
        self._engine = engine = engine_beside(
            server, facts, tokenizer, bundle.stop_ids, results, lambda: changed(), f"{lease.record.epoch}-",
            self._tiers, self._rates,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        addresses: tuple[str, ...] = ()
        if self._lender is not None:
            addresses = self._network.listen(self._lender, lambda work: soon(loop, partial(work, None)))
        lease.record = replace(
            lease.record,
            data_plane=addresses,
            blocks=engine.facts.blocks,
            block_bytes=engine.facts.block_bytes,
            kv_format=engine.facts.kv_format,
            engine_pid=server.engine_pid,
        )
        parts = WorkerParts(
            one.settings, one.connection, one.subjects, lease, engine, self._tiers, bundle,
            ModelText(tokenizer), one.tracer, adapters=server.adapters,
        )  # fmt: skip
        self._successors = Successors(one.connection, one.subjects, lease.record)
        parts.somebody_is_ready = self._successors.somebody_is_ready
        parts.somebody_decodes = self._successors.somebody_decodes
        worker = WorkerLoop(parts, one.life.fatal, one.life.stop)

        def changed() -> None:
            worker.record = replace(worker.record, engine_pid=server.engine_pid)
            worker.on_state()

        return worker

    async def start(self, worker: WorkerLoop) -> None:
        await self._network.follow(self.process.connection, self.process.subjects, worker.record)
        self._server.watch(self._engine)
        if isinstance(self._tiers, VllmTiers):
            self._tiers.store.told()  # of a hybrid model, that it has no state yet
        await preload(worker.parts)

    async def stop(self) -> None:
        await self._successors.stop()
        await self._engine.stop()
        await self._network.stop()

    def readings(self, worker: WorkerLoop) -> list[Reading]:
        return vllm_readings(worker, self._server)

    def collectors(self) -> list[Collector]:
        return [VllmMetrics(self._server.routes)]
