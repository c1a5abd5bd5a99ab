"""Loop: the worker's part of the data plane. Owns its listener, its keys, and the addresses of vaults and peers.

vaults' records, watched ──▶ RemoteTiers (set_vaults)
a peer's record, when a request names it ──Peers──▶ RemoteTiers (set_peers)
kvf_keys ──▶ KeyRing ──▶ RemoteTiers and DataPlaneServer
peers ──data plane──▶ DataPlaneServer ──▶ PeerStore ──▶ the engine's thread
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvfleet.worker.blocks.block_codec import BlockShape
from kvfleet.worker.blocks.chain_location import StateForm
from kvfleet.worker.model.base import BlockFormat
from kvfleet.worker.network.lending import Lender, PeerStore, Post
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import SourceAddress, peers_of, vaults_of
from kvfleet.worker.tiers.transfers import RemoteSettings
from kvproto import codec
from kvproto.buckets import Bucket, BucketFollower
from kvproto.connection import Connection
from kvproto.dataplane.block import BlockCodec
from kvproto.dataplane.keys import KeyRing, follow_keys
from kvproto.dataplane.server import DataPlaneCounters, DataPlaneServer
from kvproto.errors import CodecError, Unavailable
from kvproto.fleet_view import Change
from kvproto.ids import is_token
from kvproto.members import Members
from kvproto.messages import MemberRecord, Role, Tier, WorkerRecord
from kvproto.regions import link_key
from kvproto.subjects import Subjects, member_key
from kvservice import tracing
from kvservice.data_plane import client_context, limits_of, reachable, recorder_of, server_context
from kvservice.tracing import Tracer

log = logging.getLogger(__name__)

LINK_KEY = "between-regions"  # no id of the bucket: those are random, or `first`
FRESH_S = 5.0  # after which an address is looked up again: the peer may have begun a new life
ASK_S = 0.02  # for a peer's address
MOST_PEERS = 64

Meet = Callable[[str], Awaitable[None] | None]


@dataclass(eq=False, slots=True)
class Peers:
    """Where other workers serve their blocks, read from the members bucket when a request names one: if each of a
    thousand workers watched all, NATS would send a million records a second. `tell` gets all addresses when they
    change."""

    bucket: Bucket
    me: WorkerRecord
    tell: Callable[[list[SourceAddress]], None]
    _known: OrderedDict[str, tuple[float, SourceAddress | None]] = field(default_factory=OrderedDict)  # newest last

    def meet(self, worker: str) -> Awaitable[None] | None:
        """To be awaited before `worker` is asked for blocks; None if its address is known."""
        if not is_token(worker) or worker == self.me.id:  # requests bring addresses of other regions along
            return None
        known = self._known.get(worker)
        if known is not None and asyncio.get_running_loop().time() - known[0] < FRESH_S:
            return None
        return self._look_up(worker)

    async def _look_up(self, worker: str) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                entry = await self.bucket.get(member_key(Role.WORKER.value, worker))
            records = [codec.decode(WorkerRecord, entry.value)] if entry.value is not None else []
        except (Unavailable, CodecError, TimeoutError) as error:
            log.info("the address of worker %s is not known: %s", worker, str(error) or "no answer in time")
            return
        before = self._addresses()
        found = next(iter(peers_of(records, self.me)), None)
        self._known[worker] = asyncio.get_running_loop().time(), found
        self._known.move_to_end(worker)
        while len(self._known) > MOST_PEERS:
            self._known.popitem(last=False)
        if self._addresses() != before:
            self.tell(self._addresses())

    def _addresses(self) -> list[SourceAddress]:
        return [address for _, address in self._known.values() if address is not None]


@dataclass(eq=False)
class TierNetwork:
    """Made before the model is loaded, as the engine is built around `remote`; then `listen`, `follow`, and `stop` on
    the same loop. Raises InvalidRequest or Unavailable for TLS files of no use."""

    settings: WorkerSettings
    worker: str
    host: str
    folder: Path  # for the Unix socket
    tracer: Tracer = tracing.NULL
    remote: RemoteTiers | None = None
    _server: DataPlaneServer | None = None
    _keys: BucketFollower | None = None
    _vaults: Members | None = None
    _peers: Peers | None = None
    _known: dict[str, SourceAddress] = field(default_factory=dict)  # vaults

    def __post_init__(self) -> None:
        settings = self.settings
        far = {LINK_KEY: link_key(settings.fleet_key.encode())} if settings.region and settings.fleet_key else {}
        self.ring = KeyRing(accepted=far)
        self._far_keys = KeyRing(far) if far else None
        self._tls = server_context(settings), client_context(settings)

    def remote_for(self, blocks: BlockFormat, states: StateForm | None = None) -> RemoteTiers:
        shape, codec = BlockShape(*blocks.rows), BlockCodec(self.settings.vault_codec)
        settings = RemoteSettings(self.worker, self.host, blocks.kv_format, shape, codec, states=states)
        self.remote = RemoteTiers(settings, self.ring, tls=self._tls[1], far_keys=self._far_keys, tracer=self.tracer)
        return self.remote

    def listen(self, lender: Lender, post: Post) -> tuple[str, ...]:
        """Serve peers. Returns the addresses for the worker's record. Raises Unavailable."""
        self._server = DataPlaneServer(
            PeerStore(lender, post),
            self.ring,
            self.worker,
            tcp=(self.settings.data_plane_host, self.settings.data_plane_port),
            unix_path=self.folder / f"{self.worker}.sock",
            tls=self._tls[0],
            limits=limits_of(self.settings),
            on_traced=recorder_of(self.tracer, Tier.PEER),
        )
        self._server.start()
        return reachable(self._server.addresses, self.settings)

    async def follow(self, connection: Connection, subjects: Subjects, me: WorkerRecord) -> None:
        """Follow keys and addresses. Raises Unavailable."""
        self._keys = await follow_keys(connection, subjects, self.ring)
        self._vaults = Members(connection, subjects, hears=False, role=Role.VAULT)
        self._vaults.member_listeners.append(self._on_vault)
        await self._vaults.start()
        if self.remote is not None:
            self._peers = Peers(await Bucket.open(connection, subjects.members_bucket), me, self.remote.set_peers)

    def meet(self, worker: str) -> Awaitable[None] | None:
        return None if self._peers is None else self._peers.meet(worker)

    @property
    def served(self) -> DataPlaneCounters:
        return DataPlaneCounters() if self._server is None else self._server.counters

    def _on_vault(self, change: Change, record: MemberRecord) -> None:
        address = None if change is Change.LEFT else next(iter(vaults_of([record])), None)
        if address == self._known.get(record.id):
            return
        if address is None:
            del self._known[record.id]
        else:
            self._known[record.id] = address
        if self.remote is not None:
            self.remote.set_vaults(list(self._known.values()))

    async def stop(self) -> None:
        for followed in (self._vaults, self._keys):
            if followed is not None:
                await followed.stop()
        for owner in (self._server, self.remote):
            if owner is not None:
                await asyncio.get_running_loop().run_in_executor(None, owner.close)
