"""Loop: counts each tenant's sessions and sweeps expired ones, by a watch on the heads in the sessions bucket. It lags
behind by a message: as many sessions as begin at once may pass a limit."""

from __future__ import annotations

import asyncio
import heapq
import logging
from dataclasses import dataclass, field

from kvfleet.ingress.sessions.sessions import Sessions
from kvproto import codec
from kvproto.buckets import BucketWatch, Entry
from kvproto.errors import CodecError, KvfleetError, LimitExceeded
from kvproto.messages import SessionHead
from kvproto.tasks import end

log = logging.getLogger(__name__)

HEADS = "*.*"  # <tenant>.<hash>; chunks have two tokens more
AUTO_PREFIX = "auto-"
SWEPT_AT_ONCE = 200


def auto_seq_id(request: str) -> str:
    """The name of a session whose caller gave none; repeats of the request find it. Such sessions give way first when a
    tenant has too many."""
    return AUTO_PREFIX + request


@dataclass(slots=True)
class SessionTable:
    """Key -> (last use in unix ms, may give way) of every session, per tenant. Pure."""

    _tenants: dict[str, dict[str, tuple[int, bool]]] = field(default_factory=dict)
    total: int = 0

    def put(self, key: str, head: SessionHead) -> None:
        sessions = self._tenants.setdefault(key.partition(".")[0], {})
        self.total += key not in sessions
        gives_way = head.seq_id.startswith(AUTO_PREFIX) and head.turns <= 1
        sessions[key] = (head.updated_unix_ms, gives_way)

    def remove(self, key: str) -> None:
        tenant = key.partition(".")[0]
        sessions = self._tenants.get(tenant, {})
        if sessions.pop(key, None) is not None:
            self.total -= 1
            if not sessions:
                del self._tenants[tenant]

    def count(self, tenant: str) -> int:
        return len(self._tenants.get(tenant, ()))

    def unused_since(self, unix_ms: int, limit: int) -> list[str]:
        """Up to `limit` sessions of all tenants last used before a time."""
        found: list[str] = []
        for sessions in self._tenants.values():
            for key, (updated, _) in sessions.items():
                if updated < unix_ms:
                    found.append(key)
                    if len(found) == limit:
                        return found
        return found

    def surplus(self, tenant: str, limit: int) -> list[str]:
        """The tenant's oldest unnamed sessions of one turn at most."""
        candidates = ((updated, key) for key, (updated, free) in self._tenants.get(tenant, {}).items() if free)
        return [key for _, key in heapq.nsmallest(limit, candidates)]


@dataclass(eq=False, slots=True)
class SessionIndex:
    """`read` follows the bucket, for a `BucketFollower`; `run` sweeps it until cancelled."""

    sessions: Sessions
    table: SessionTable = field(default_factory=SessionTable)
    _making_room: dict[str, asyncio.Task[int]] = field(default_factory=dict)

    async def admit(self, tenant: str) -> None:
        """Make room for one more session. Raises LimitExceeded when the tenant has named too many itself."""
        if self.table.count(tenant) < self.sessions.limits.per_tenant:
            return
        room = self._making_room.get(tenant)
        if room is None:
            room = self._making_room[tenant] = asyncio.create_task(self._make_room(tenant))
            room.add_done_callback(lambda _: self._making_room.pop(tenant, None))
        if not await asyncio.shield(room):
            raise LimitExceeded(
                f"the tenant has {self.sessions.limits.per_tenant} sessions, the most that are kept: delete some",
                field="seq_id",
                retry_after_s=60.0,
            )

    async def _make_room(self, tenant: str) -> int:
        """A hundredth of the limit at once, so that a tenant at its limit does not pay for every turn."""
        surplus = self.table.surplus(tenant, max(1, self.sessions.limits.per_tenant // 100))
        return sum([await self.sessions.erase_key(key, only_expired=False) for key in surplus])

    async def sweep(self) -> int:
        """Erase expired sessions; returns how many. Two ingresses that sweep at once do no harm."""
        before = self.sessions.unix_ms() - int(self.sessions.limits.idle_expiry_s * 1000)
        unused = self.table.unused_since(before, SWEPT_AT_ONCE)
        return sum([await self.sessions.erase_key(key, only_expired=True) for key in unused])

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(self.sessions.limits.sweep_period_s)
                try:
                    if gone := await self.sweep():
                        log.info("%d idle sessions expired", gone)
                except KvfleetError as error:
                    log.warning("sessions not swept: %s", error)
        finally:
            await end(self._making_room.values())

    async def read(self, watch: BucketWatch) -> None:
        """Of `HEADS`."""
        self.table = SessionTable()
        async for entry in watch.entries():
            if entry is not None:
                self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        if entry.value is None:
            self.table.remove(entry.key)
            return
        try:
            self.table.put(entry.key, codec.decode(SessionHead, entry.value))
        except CodecError as error:
            log.warning("sessions: record %s is unreadable: %s", entry.key, error)
