"""Loop: responses in the background. Each is carried by the ingress that its record names.

    begun here ─▶ kept ─▶ ended                  its record says how, and it is active no more
    another's, whose ingress is gone ─▶ kept     the same request, from the same ids: the same tokens
    kept ─▶ left                                 this ingress drains: the record names none, and another takes it

One that was cancelled or deleted, at any ingress, ends everywhere: its active record is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kvfleet.ingress.request_reader import Call
from kvfleet.ingress.requests.responses import ResponseAsk
from kvfleet.ingress.responses.response_jobs import ResponseJobs, ResponseTurn, call_of
from kvfleet.ingress.responses.response_records import ResponseRecords
from kvfleet.ingress.runs.jobs import HeldTurn, Job
from kvfleet.ingress.runs.repeats import RequestName
from kvfleet.ingress.runs.runs import Run
from kvproto import codec
from kvproto.buckets import BucketWatch, Entry, StaleRevision
from kvproto.errors import Cancelled, CodecError, KvfleetError, LimitExceeded, NotFound, Unavailable
from kvproto.messages import ActiveResponse, ResponseStatus
from kvproto.tasks import end

log = logging.getLogger(__name__)

LOOK_S = 0.5
RETRY_S = 1.0
LONGEST_RETRY_S = 10.0
MAX_TAKEOVERS = 16  # more than that, and it is the response that ends its ingresses

MakeJob = Callable[[Callable[[], None]], Awaitable[Job]]  # of what to call once it may start


@dataclass(eq=False)
class Keeper:
    """Carries one response. `begun` once it is stored and may start."""

    call: Call[ResponseAsk]
    make: MakeJob
    held: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    run: Run | None = None
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    _turn: ResponseTurn | None = None

    def took(self, run: Run) -> None:
        self.run = run

    async def prepare(self) -> Job:
        job = await self.make(self.begun.set)
        assert isinstance(job.turn, ResponseTurn)
        self.held, self._turn = self.revision, job.turn
        return job

    async def ready(self) -> None:
        """Raises what kept it from beginning."""
        assert self.task is not None
        begun = asyncio.ensure_future(self.begun.wait())
        await asyncio.wait({begun, self.task}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self.task.done() and not self.begun.is_set():
            self.task.result()

    async def leave(self) -> None:
        self.leaves.set()
        if self.run is not None:
            await self.run.leave(self)
        if self.task is not None:
            await asyncio.wait({self.task})

    @property
    def revision(self) -> int:
        """Of its active record; 0 while that is another ingress's."""
        return self.held or (self._turn.revision if self._turn is not None else 0)


@dataclass(eq=False)
class Background:
    """Owned by the event loop. `is_alive` says so of other ingresses."""

    jobs: ResponseJobs
    records: ResponseRecords
    is_alive: Callable[[str], bool]
    retry_for_s: float
    _kept: dict[str, Keeper] = field(default_factory=dict)  # by request
    _active: dict[str, tuple[ActiveResponse, int]] = field(default_factory=dict)  # by key, with its revision
    _stopping: set[asyncio.Task[None]] = field(default_factory=set)
    taken_over_total: int = 0

    @property
    def kept(self) -> int:
        return len(self._kept)

    def keep(self, call: Call[ResponseAsk], make: MakeJob, held: int = 0) -> Keeper:
        """Carry it from now on, if this ingress does not already. `held`: of an active record that was taken over."""
        keeper = self._kept.get(call.name.request)
        if keeper is None:
            keeper = self._kept[call.name.request] = Keeper(call, make, held)
            keeper.task = asyncio.create_task(self._carry(keeper), name=f"response-{call.name.request}")
            keeper.task.add_done_callback(_log_fault)
        return keeper

    async def _carry(self, keeper: Keeper) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + self.retry_for_s
        try:
            while not keeper.leaves.is_set():
                try:
                    await self.jobs.flow.follow(keeper.call, keeper.prepare, keeper, keeper.took)
                    keeper.begun.set()
                    return
                except KvfleetError as error:
                    if keeper.leaves.is_set() or (isinstance(error, Cancelled) and keeper.begun.is_set()):
                        return
                    if not keeper.begun.is_set() and not keeper.held:
                        raise
                    if clock() > until or not (error.retryable or isinstance(error, LimitExceeded)):
                        await self._fail(keeper, error)
                        return
                    log.info("response %s goes on later: %s", keeper.call.name.request, error.code)
                    with contextlib.suppress(TimeoutError):
                        wait_s = min(error.retry_after_s or RETRY_S, LONGEST_RETRY_S)
                        await asyncio.wait_for(keeper.leaves.wait(), wait_s)
        finally:
            del self._kept[keeper.call.name.request]

    async def _fail(self, keeper: Keeper, error: KvfleetError) -> None:
        """While JetStream is away it is left to others."""
        log.info("response %s failed: %s", keeper.call.name.request, error.code)
        tenant, request = keeper.call.caller.tenant, keeper.call.name.request
        with contextlib.suppress(Unavailable, NotFound):
            stored = await self.records.find(tenant, request)
            asked = await self.records.asked(stored)
            await ResponseTurn(self.records, HeldTurn(), tenant, stored.head, asked).fail(error)

    async def read(self, watch: BucketWatch) -> None:
        """Of `ACTIVE`."""
        self._active.clear()
        async for entry in watch.entries():
            if entry is not None:
                self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        _, tenant, request = entry.key.split(".")
        if entry.value is None:
            if self._active.pop(entry.key, None) is not None and self._run_of(tenant, request) is not None:
                task = asyncio.create_task(self._ended(tenant, request), name=f"response-ended-{request}")
                self._stopping.add(task)
                task.add_done_callback(self._stopping.discard)
            return
        try:
            self._active[entry.key] = codec.decode(ActiveResponse, entry.value), entry.revision
        except CodecError as error:
            log.warning("responses: record %s is unreadable: %s", entry.key, error)

    def _run_of(self, tenant: str, request: str) -> Run | None:
        run = self.jobs.flow.parts.runs.known(tenant, RequestName(request))
        return None if run is None or run.over else run

    async def _ended(self, tenant: str, request: str) -> None:
        """Stop it here, too, if it was cancelled or deleted."""
        try:
            status = (await self.records.find(tenant, request)).head.status
        except NotFound:
            status = ResponseStatus.CANCELLED
        except Unavailable:
            return
        run = self._run_of(tenant, request)
        if run is not None and status is ResponseStatus.CANCELLED:
            await run.stop(Cancelled("the response was cancelled"))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for active, revision in list(self._active.values()):
                if self._is_left(active):
                    try:
                        await self._take_over(active, revision)
                    except KvfleetError as error:
                        log.warning("response %s is not taken over yet: %s", active.request, error)

    def _is_left(self, active: ActiveResponse) -> bool:
        if active.ingress == self.jobs.ingress:
            return active.request not in self._kept
        return not active.ingress or not self.is_alive(active.ingress)

    async def _take_over(self, active: ActiveResponse, revision: int) -> None:
        parts, tenant, request = self.jobs.flow.parts, active.tenant, active.request
        if parts.admission.draining:
            return
        try:
            mine = replace(active, ingress=self.jobs.ingress, takeovers=active.takeovers + 1)
            held = await self.records.hold(mine, revision)
        except StaleRevision:
            return  # another ingress was faster, or it has ended
        try:
            stored = await self.records.find(tenant, request)
            asked = await self.records.asked(stored)
        except NotFound:  # its ingress was gone before it had answered its client
            with contextlib.suppress(StaleRevision):  # its client asks again, and it has just begun
                await self.records.drop(tenant, request, held)
            return
        if stored.is_over:
            await self.records.drop(tenant, request)
            return
        log.info("response %s: its ingress is gone, it goes on here", request)
        call = call_of(stored, asked, parts.tenancy.caller_named(tenant, active.caller), active.priority)
        if mine.takeovers > MAX_TAKEOVERS:
            turn = ResponseTurn(self.records, HeldTurn(), tenant, stored.head, asked)
            await turn.fail(KvfleetError(f"{MAX_TAKEOVERS} ingresses ended while it ran"))
            return
        self.taken_over_total += 1
        self.keep(call, partial(self.jobs.restored, call, stored, asked), held)

    async def hand_over(self) -> None:
        """To the other ingresses, or to the next one here."""
        await asyncio.gather(*map(self._hand_over, list(self._kept.values())))

    async def _hand_over(self, keeper: Keeper) -> None:
        await keeper.leave()
        if not keeper.revision:
            return
        caller, request = keeper.call.caller, keeper.call.name.request
        active = ActiveResponse(caller.tenant, request, "", caller.name, keeper.call.priority)
        with contextlib.suppress(KvfleetError):
            await self.records.hold(active, keeper.revision)

    async def close(self) -> None:
        await end([*self._stopping, *(one.task for one in self._kept.values() if one.task is not None)])


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, KvfleetError):
        log.error("%s failed", task.get_name(), exc_info=error)
