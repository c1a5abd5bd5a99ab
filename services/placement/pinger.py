"""Tells whether a suspected worker is dead. Owned by the loop."""

from __future__ import annotations

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import KvfleetError, WorkerLost
from kvproto.fleet_view import RECONNECT_GRACE_S, FleetView
from kvproto.messages import AdminCommand, AdminRequest
from kvproto.subjects import Subjects

PING_S = 0.05
PINGS = 2  # silence may be a pause of the worker; a 503 leaves no doubt


class Pinger:
    """Asks on the worker's admin subject, which its event loop answers however busy its engine is."""

    def __init__(self, connection: Connection, subjects: Subjects, view: FleetView) -> None:
        self._connection = connection
        self._subjects = subjects
        self._view = view
        self._asking: set[str] = set()

    async def is_dead(self, worker: str) -> bool:
        """True only if nobody listens there, or nothing at all was heard within 100 ms.

        Not if its record changed meanwhile (it registered again), not while our own connection is down or just back
        (the workers' are too), and not if the same question is being asked already.
        """
        known = self._view.workers.get(worker)
        if known is None or worker in self._asking:
            return False
        revision, heartbeat_at = known.revision, known.heartbeat_at
        self._asking.add(worker)
        try:
            answered = await self._ask(worker)
        finally:
            self._asking.discard(worker)
        if answered is True or known.revision != revision or not self._is_steady():
            return False
        return answered is False or known.heartbeat_at == heartbeat_at

    async def _ask(self, worker: str) -> bool | None:
        """True: it answered, or nobody can tell; False: nobody listens; None: silence."""
        question = codec.encode(AdminRequest(AdminCommand.STATS))
        for _ in range(PINGS):
            try:
                await self._connection.request(self._subjects.worker_admin(worker), question, PING_S)
                return True
            except WorkerLost:
                return False
            except TimeoutError:
                continue
            except KvfleetError:
                return True
        return None

    def _is_steady(self) -> bool:
        connection = self._connection
        if not connection.is_connected:
            return False
        return connection.reconnects_total == 0 or connection.connected_for_s > RECONNECT_GRACE_S
