"""Loop: the worker's part of the data plane. Owns its listener, its keys, and who the vaults and peers are.

members view ──every half second──▶ RemoteTiers (set_vaults, set_peers)
kvf_keys ──▶ KeyRing ──▶ RemoteTiers and DataPlaneServer
peers ──data plane──▶ DataPlaneServer ──▶ PeerStore ──▶ EngineLender ──▶ the engine's thread
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvproto.connection import Connection
from kvproto.dataplane.block import BlockCodec
from kvproto.dataplane.keys import KeyRing, KeyWatch, follow_keys
from kvproto.dataplane.server import DataPlaneServer
from kvproto.members import Members
from kvproto.messages import WorkerRecord
from kvproto.subjects import Subjects
from kvproto.tasks import end
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


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Of the data plane, where it is to be encrypted: both sides show a certificate of one CA."""

    ca: Path
    certificate: Path
    key: Path

    def server(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.ca))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        return context

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(self.ca))
        context.check_hostname = False  # who it is, is proved by the data plane's own challenge
        context.load_cert_chain(self.certificate, self.key)
        return context


class TierNetwork:
    """Made before the model is loaded, as the engine is built around `remote`; `listen` once there is an engine,
    `follow` once NATS is to be asked. `stop` from the loop that started it."""

    def __init__(self, settings: WorkerSettings, worker: str, host: str, tls: TlsFiles | None = None) -> None:
        self.ring = KeyRing()
        self.remote: RemoteTiers | None = None
        self._settings = settings
        self._worker = worker
        self._host = host
        self._tls = tls
        self._server: DataPlaneServer | None = None
        self._keys: KeyWatch | None = None
        self._members: Members | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._known: tuple[list[SourceAddress], list[SourceAddress]] = [], []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def remote_for(self, memory: BlockMemory) -> RemoteTiers:
        """What the engine of such blocks asks."""
        settings = RemoteSettings(
            self._worker,
            self._host,
            memory.kv_format,
            BlockShape(*memory.rows),
            BlockCodec(self._settings.vault_codec),
        )
        self.remote = RemoteTiers(settings, self.ring, tls=self._tls.client() if self._tls is not None else None)
        return self.remote

    def listen(self, tiers: Tiers, thread: EngineThread) -> tuple[str, ...]:
        """Serve peers from now on; returns the addresses for the worker's record. Raises Unavailable."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvf-")  # of mode 0700; short, as a socket's path must be
        self._server = DataPlaneServer(
            PeerStore(EngineLender(tiers, thread.post), tiers.memory.kv_format),
            self.ring,
            self._worker,
            tcp=(self._settings.data_plane_host, self._settings.data_plane_port),
            unix_path=Path(self._folder.name) / "w.sock",
            tls=self._tls.server() if self._tls is not None else None,
        )
        self._server.start()
        return self._server.addresses

    async def follow(self, connection: Connection, subjects: Subjects, me: WorkerRecord) -> None:
        """Learn keys and addresses, and go on doing so. Raises Unavailable."""
        self._keys = await follow_keys(connection, subjects, self.ring)
        self._members = Members(connection, subjects)
        await self._members.start()
        self._refresh(me)
        self._refreshing = asyncio.create_task(self._keep_fresh(me), name="tier-addresses")

    async def _keep_fresh(self, me: WorkerRecord) -> None:
        while True:
            await asyncio.sleep(REFRESH_PERIOD_S)
            self._refresh(me)

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
        if self._folder is not None:
            self._folder.cleanup()
