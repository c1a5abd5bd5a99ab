"""Asks suspected workers for a sign of life. Owned by the loop."""

from __future__ import annotations

from enum import Enum

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import KvfleetError, WorkerLost
from kvproto.fleet_view import RECONNECT_GRACE_S, FleetView
from kvproto.messages import AdminCommand, AdminRequest
from kvproto.subjects import Subjects

PING_S = 0.05


class PingVerdict(Enum):
    NO_DOUBT_OF_LIFE = "answered, or nobody can tell"
    NOBODY_LISTENS = "nobody listens there"
    SILENCE = "no answer"


class Pinger:
    """Pings go to the worker's admin subject, which its event loop answers however busy its engine is."""

    def __init__(self, connection: Connection, subjects: Subjects, view: FleetView) -> None:
        self._connection = connection
        self._subjects = subjects
        self._view = view
        self._asking: set[str] = set()

    async def ask(self, worker: str) -> PingVerdict:
        """Takes at most 50 ms.

        Nobody can tell while our own connection is down, silent or just back (the workers' are too), if the worker's
        record changed meanwhile (it registered again), or while the same question is being asked already.
        """
        known = self._view.workers.get(worker)
        if known is None or worker in self._asking:
            return PingVerdict.NO_DOUBT_OF_LIFE
        revision = known.revision
        self._asking.add(worker)
        try:
            verdict = await self._ping(worker)
        finally:
            self._asking.discard(worker)
        if known.revision != revision or not self._is_steady():
            return PingVerdict.NO_DOUBT_OF_LIFE
        return verdict

    async def _ping(self, worker: str) -> PingVerdict:
        question = codec.encode(AdminRequest(AdminCommand.STATS))
        try:
            await self._connection.request(self._subjects.worker_admin(worker), question, PING_S)
        except WorkerLost:
            return PingVerdict.NOBODY_LISTENS
        except TimeoutError:
            return PingVerdict.SILENCE
        except KvfleetError:
            pass  # our own connection's trouble
        return PingVerdict.NO_DOUBT_OF_LIFE

    def _is_steady(self) -> bool:
        connection = self._connection
        return connection.is_settled(RECONNECT_GRACE_S) and not connection.is_silent
