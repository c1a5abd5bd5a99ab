"""Loop: the worker's part of the data plane. Owns its listener, its keys, and who the vaults and peers are.

members view ──every half second──▶ RemoteTiers (set_vaults, set_peers)
kvf_keys ──▶ KeyRing ──▶ RemoteTiers and DataPlaneServer
peers ──data plane──▶ DataPlaneServer ──▶ PeerStore ──▶ EngineLender ──▶ the engine's thread
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from kvproto.connection import Connection
from kvproto.dataplane.block import BlockCodec
from kvproto.dataplane.keys import KeyRing, KeyWatch, follow_keys
from kvproto.dataplane.server import Counters, DataPlaneServer
from kvproto.members import Members
from kvproto.messages import Tier, WorkerRecord
from kvproto.regions import link_key
from kvproto.subjects import Subjects
from kvproto.tasks import end
from kvservice import tracing
from kvservice.block_spans import recorder_of
from kvservice.data_plane import client_context, reachable, server_context
from kvservice.tracing import Tracer
from services.worker.engine_thread import EngineThread
from services.worker.model.base import BlockMemory
from services.worker.settings import WorkerSettings
from services.worker.tiers.codecs.block_shape import BlockShape
from services.worker.tiers.lending import EngineLender
from services.worker.tiers.peer_store import PeerStore
from services.worker.tiers.remote import RemoteSettings, RemoteTiers
from services.worker.tiers.source_address import SourceAddress, peers_of, vaults_of
from services.worker.tiers.tiers import Tiers

log = logging.getLogger(__name__)

REFRESH_PERIOD_S = 0.25
LINK_KEY = "between-regions"  # no id of the bucket: those are random, or `first`


class TierNetwork:
    """Made before the model is loaded, as the engine is built around `remote`; `listen` once there is an engine,
    `follow` once NATS is to be asked. `stop` from the loop that started it."""

    def __init__(
        self, settings: WorkerSettings, worker: str, host: str, folder: Path, tracer: Tracer = tracing.NULL
    ) -> None:
        """`folder` is for the Unix socket. Raises InvalidRequest or Unavailable for TLS files of no use."""
        far = {LINK_KEY: link_key(settings.fleet_key.encode())} if settings.region and settings.fleet_key else {}
        self.ring = KeyRing(accepted=far)
        self._far_keys = KeyRing(far) if far else None
        self.remote: RemoteTiers | None = None
        self._settings = settings
        self._worker = worker
        self._host = host
        self._folder = folder
        self._tracer = tracer
        self._tls = server_context(settings), client_context(settings)
        self._server: DataPlaneServer | None = None
        self._keys: KeyWatch | None = None
        self._members: Members | None = None
        self._model: str | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._known: tuple[list[SourceAddress], list[SourceAddress]] = [], []

    def remote_for(self, memory: BlockMemory) -> RemoteTiers:
        """What the engine of such blocks asks."""
        settings = RemoteSettings(
            self._worker,
            self._host,
            memory.kv_format,
            BlockShape(*memory.rows),
            BlockCodec(self._settings.vault_codec),
        )
        self.remote = RemoteTiers(settings, self.ring, tls=self._tls[1], far_keys=self._far_keys, tracer=self._tracer)
        return self.remote

    def listen(self, tiers: Tiers, thread: EngineThread) -> tuple[str, ...]:
        """Serve peers from now on; returns the addresses for the worker's record. Raises Unavailable."""
        self._server = DataPlaneServer(
            PeerStore(EngineLender(tiers, thread.post), tiers.memory.kv_format),
            self.ring,
            self._worker,
            tcp=(self._settings.data_plane_host, self._settings.data_plane_port),
            unix_path=self._folder / f"{self._worker}.sock",
            tls=self._tls[0],
            on_traced=recorder_of(self._tracer, Tier.PEER),
        )
        self._server.start()
        return reachable(self._server.addresses, self._settings)

    async def follow(self, connection: Connection, subjects: Subjects, me: WorkerRecord) -> None:
        """Learn keys and addresses, and go on doing so. Raises Unavailable."""
        self._keys = await follow_keys(connection, subjects, self.ring)
        self._model = me.model
        self._members = Members(connection, subjects, hears=False)
        await self._members.start()
        self._refresh(me)
        self._refreshing = asyncio.create_task(self._keep_fresh(me), name="tier-addresses")

    @property
    def served(self) -> Counters:
        """What peers asked of this worker."""
        return Counters() if self._server is None else self._server.counters

    def has_successor(self) -> bool:
        """Whether another worker of this model takes new work."""
        if self._members is None or self._model is None:
            return False
        return any(view.record.id != self._worker for view in self._members.view.ready(self._model))

    async def _keep_fresh(self, me: WorkerRecord) -> None:
        while True:
            await asyncio.sleep(REFRESH_PERIOD_S)
            try:
                self._refresh(me)
            except Exception:  # a loop's top: else vaults and peers would stay as they are for ever
                log.exception("vaults and peers could not be taken over")

    def _refresh(self, me: WorkerRecord) -> None:
        assert self._members is not None
        view = self._members.view
        vaults = vaults_of(record for record, _ in view.members.values())
        workers = [known for worker in view.workers if (known := view.with_state(worker)) is not None]
        found = vaults, peers_of(workers, me)
        if found == self._known or self.remote is None:
            return
        self._known = found
        self.remote.set_vaults(found[0])
        self.remote.set_peers(found[1])

    async def stop(self) -> None:
        """Nobody is served, nobody is asked any more."""
        if self._refreshing is not None:
            await end([self._refreshing])
        if self._members is not None:
            await self._members.stop()
        if self._keys is not None:
            await self._keys.stop()
        loop = asyncio.get_running_loop()
        if self._server is not None:
            await loop.run_in_executor(None, self._server.close)
        if self.remote is not None:
            await loop.run_in_executor(None, self.remote.close)
