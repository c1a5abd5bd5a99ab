"""Loop: the requests of this process that run, or ended a short while ago, by request id.

Readers are the exchanges of a run's clients. Whichever has nothing to write reads the stream for all (`step`), so that
none waits for another's slow client, and a request without repeats needs no task but its own.

    begun ──▶ driven ──Finished, committed──▶ finished ──▶ forgotten after `grace_s` (with a key: `replay_s`)
                │  ▲ a client comes back: generation goes on after the tokens that are here
                │  │
                └─▶ parked: its last client left. The stream is cancelled, nothing runs for it ──▶ forgotten after grace

One that fails is forgotten, unless trying again may help: then it is parked with what it has.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvfleet.ingress.limits.admission import RunMemory
from kvfleet.ingress.limits.callers import Caller
from kvfleet.ingress.limits.limiter import RunUsage
from kvfleet.ingress.limits.service_levels import ServiceLevel
from kvfleet.ingress.runs.jobs import Form, Job, Prepare, Start
from kvfleet.ingress.runs.repeats import RequestName
from kvfleet.ingress.runs.transcript import Transcript
from kvfleet.ingress.settings import RunLimits
from kvproto.errors import Cancelled, KvfleetError, LimitExceeded, PayloadTooLarge, RequestMismatch
from kvproto.streams.stream import Stream

SWEEP_PERIOD_S = 5.0


@dataclass(eq=False, slots=True)
class Run:
    """One request and what it has brought. Owned by the event loop; changed by whichever reader is in `step`.

    `prepare` makes its job; it holds the request's body, so it becomes None once the job is there.
    """

    tenant: str
    request: str
    digest: bytes
    keyed: bool
    prepare: Prepare | None
    start: Start
    memory: RunMemory
    traceparent: str | None = None  # of the request that began it
    usage: RunUsage | None = None  # however many read it
    on_tokens: Callable[[int], None] = lambda count: None  # how many came; called once for each read of the stream
    job: Job | None = None  # once it is prepared, while it may have to go on
    form: Form | None = None  # once it is prepared
    level: ServiceLevel | None = None  # of model and route, once it is prepared
    transcript: Transcript = field(default_factory=Transcript)
    error: KvfleetError | None = None
    finished: bool = False
    busy: bool = False  # a reader is in `step`
    readers: set[object] = field(default_factory=set)
    payer: Caller | None = None  # counted in this caller's limits, while it runs
    starts: int = 0
    steps: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    held: int = 0  # bytes of `memory`; 0: it does not run
    _gap_from: float | None = None  # time of the last tokens of the present stream
    _stream: Stream | None = None
    _abandoned: bool = False
    _ends_with: KvfleetError | None = None  # for all its readers
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        """Nothing more will come to its present readers."""
        return self.finished or self.error is not None

    @property
    def may_go_on(self) -> bool:
        """Whether it failed and a repeat can go on from it."""
        return self.form is not None and self.error is not None and self.error.retryable

    @property
    def size(self) -> int:
        """Approximate bytes of memory."""
        form = self.form.size if self.form is not None else 0
        job = self.job.size if self.job is not None else 0
        return self.transcript.size + form + job

    def hold(self) -> None:
        """Begin to count it in `memory`, unless it is counted already."""
        if not self.held:
            self.held = self.size
            self.memory.holders += 1
            self.memory.used += self.held

    def free(self) -> None:
        """Stop counting it in `memory`."""
        if self.held:
            self.memory.holders -= 1
            self.memory.used -= self.held
            self.held = 0

    def _grow(self, count: int) -> None:
        """Raises PayloadTooLarge beyond its share."""
        self.held += count
        self.memory.used += count
        if self.memory.used > self.memory.half and self.transcript.finished is None:
            self.memory.check_share(self.held)

    async def changed(self) -> None:
        """Waits for tokens, the end, an idle `step`, or a reader's leave."""
        await self._change.wait()

    def _wake(self) -> None:
        self._change.set()
        self._change.clear()

    async def step(self) -> None:
        """Prepare, start, or read the stream once; an end is committed before any reader sees it. Raises only internal
        faults: other errors are in `error`."""
        assert not self.busy
        assert not self.over
        self.busy = True
        self.steps += 1
        count = 0
        try:
            job = self.job
            if job is None:
                await self._read_job()
                return
            if self._stream is None:
                await self._begin(job)
            if self._stream is not None:
                events = await self._stream.read()
                before = self.transcript.size
                count = self.transcript.take(events)
                self.transcript.served_by(self._stream.worker)
                self._grow(self.transcript.size - before)
                if (self._abandoned or self._ends_with is not None) and self.transcript.finished is None:
                    raise Cancelled("the client left")  # what was buffered may come after the cancellation
            if count:
                now = asyncio.get_running_loop().time()
                self.last_token_at = now
                if self.first_token_at is None:
                    self.first_token_at = now
                if self.level is not None:
                    gap_s = None if self._gap_from is None else now - self._gap_from
                    self.level.came(gap_s, count, len(self.transcript.choices))
                self._gap_from = now
            if self.transcript.finished is not None:
                await job.turn.commit(self.transcript)
                self.finished = True
                self.job = self._stream = None
        except KvfleetError as error:
            if not self._abandoned or self.transcript.finished is not None:
                self.error = self._ends_with or error  # else it is the cancellation that `leave` asked for
            await self._abandon_turn()
            if isinstance(error, PayloadTooLarge):  # its turn knows what was computed; nothing else is left of it
                self.transcript = self.transcript.emptied()
                self.free()
        except BaseException:
            self.error = KvfleetError("internal error")
            await self._abandon_turn()
            raise
        finally:
            self.busy = False
            self._wake()
        if count:
            self.on_tokens(count)

    def join(self, reader: object) -> None:
        """A client has come, perhaps back before its run was stopped."""
        self.readers.add(reader)
        if self._stream is None:
            self._abandoned = False

    async def leave(self, reader: object) -> None:
        """A client has left; after the last one the run stops. Does nothing when called again."""
        if reader not in self.readers:
            return
        self.readers.discard(reader)
        if not self.readers and not self.over:
            self._abandoned = True
            if self.busy:
                if self._stream is not None:
                    await self._stream.cancel(self.transcript.totals)  # its reader lets go of the rest
            else:
                self.busy = True
                try:
                    await self._abandon_turn()
                finally:
                    self.busy = False
        self._wake()

    async def stop(self, error: KvfleetError) -> None:
        """End it, with this error for all its readers, unless it is over."""
        if self.over:
            return
        self._ends_with = error
        if not self.busy:
            self.error = error
            await self._abandon_turn()
        elif self._stream is not None:
            await self._stream.cancel(self.transcript.totals)  # its reader ends it
        self._wake()

    async def _read_job(self) -> None:
        assert self.prepare is not None
        self.job = job = await self.prepare()
        self.prepare = None
        self.form = job.form
        self.level = job.level
        self.transcript = job.transcript()
        self._grow(self.size - self.held)

    async def _begin(self, job: Job) -> None:
        await job.turn.open()
        if not self.readers:
            self._abandoned = True
            raise Cancelled("the client left")
        if self.transcript.finished is None:  # else only its commit is missing
            self.starts += 1
            self._gap_from = None  # without a reader no token was asked for
            generation = job.generation
            if self.transcript.prompt_scores:
                generation = replace(generation, scored=1 + len(self.transcript.prompt_scores))
            self._stream = self.start(generation, self.transcript.continuations())

    async def _abandon_turn(self) -> None:
        """Cancel the stream at its worker, and free the turn."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.cancel(self.transcript.totals)
            self.transcript.served_by(stream.worker)
            self.transcript.begun = self.transcript.begun or stream.accepted
        if self.job is not None:
            await self.job.turn.abandon(self.transcript)
        self._abandoned = False

    def resumed(self) -> Run:
        """A failed run for those who try again: the same job and transcript, without error and readers."""
        again = Run(self.tenant, self.request, self.digest, self.keyed, None, self.start, self.memory)
        for kept in ("traceparent", "usage", "on_tokens", "job", "form", "level", "transcript", "starts"):
            setattr(again, kept, getattr(self, kept))
        return again


@dataclass(eq=False, slots=True)
class Runs:
    """The table of runs. Owned by the event loop."""

    limits: RunLimits
    now: Callable[[], float]
    memory: RunMemory = field(init=False)
    kept_bytes: int = 0
    attached_total: int = 0
    resumed_total: int = 0
    replayed_total: int = 0
    _runs: dict[str, Run] = field(default_factory=dict)  # by request id: no two tenants have one at the same time
    _ended: tuple[OrderedDict[str, float], OrderedDict[str, float]] = field(
        default_factory=lambda: (OrderedDict(), OrderedDict())
    )

    def __post_init__(self) -> None:
        self.memory = RunMemory(self.limits.running_bytes)

    @property
    def kept(self) -> int:
        """Runs that have ended or are parked."""
        return sum(map(len, self._ended))

    def is_foreign(self, tenant: str, request: str) -> bool:
        """Whether the id is another tenant's, which no caller may learn."""
        return request in self._runs and self._runs[request].tenant != tenant

    def known(self, tenant: str, name: RequestName) -> Run | None:
        """The run of a request's name; its body is not compared yet."""
        return None if self.is_foreign(tenant, name.request) else self._runs.get(name.request)

    def find(self, tenant: str, name: RequestName, digest: bytes) -> Run | None:
        """The run that this repeats, also one that failed and may go on. Raises RequestMismatch for another body,
        LimitExceeded for too many readers."""
        self.sweep()
        run = self.known(tenant, name)
        if run is None:
            return None
        if run.digest != digest:
            raise RequestMismatch("was used for another request: route and body must be the same", field=name.header)
        if run.error is not None:
            return run if run.may_go_on else None
        if len(run.readers) >= self.limits.readers:
            raise LimitExceeded(f"{self.limits.readers} connections read this request already", retry_after_s=1.0)
        return run

    def add(self, run: Run) -> None:
        """A new one, perhaps in place of one that failed and still has readers."""
        if (failed := self._runs.get(run.request)) is not None:
            assert failed.error is not None
            failed.free()
        self._runs[run.request] = run
        run.hold()

    def attach(self, run: Run, reader: object) -> Run:
        """One more reader; a failed run is replaced by one that goes on, a finished one is replayed."""
        if run.error is not None:
            run = self._resume(run)
        if run.finished:
            self.replayed_total += 1
        elif run.readers:
            self.attached_total += 1
        elif run.form is not None:
            self.resumed_total += 1
            if self._ended[run.keyed].pop(run.request, None) is not None:
                self.kept_bytes -= run.size
            run.hold()
        run.join(reader)
        return run

    async def detach(self, run: Run, reader: object) -> None:
        """A reader has gone: its client left, or has it all."""
        await run.leave(reader)
        while run.busy and not run.readers:  # a reader that left before lets go of the rest
            await run.changed()
        if run.readers or self._runs.get(run.request) is not run or run.request in self._ended[run.keyed]:
            return
        if run.error is not None and run.may_go_on:
            run = self._resume(run)
        if run.form is None or run.error is not None:
            del self._runs[run.request]
            run.free()
        else:
            self._keep(run)

    def forget(self, run: Run) -> None:
        """Of one that has ended, for good, before its time."""
        if self._ended[run.keyed].pop(run.request, None) is not None:
            self.kept_bytes -= run.size
            del self._runs[run.request]

    def drop(self, run: Run) -> None:
        """Forget one that has no reader any more, and to which nobody can come back."""
        if self._runs.get(run.request) is run:
            del self._runs[run.request]
        run.free()

    def sweep(self) -> None:
        """Forget runs that are too old, and the oldest beyond the memory bound."""
        now = self.now()
        for queue, keep_s in zip(self._ended, (self.limits.grace_s, self.limits.replay_s), strict=True):
            while queue and now - next(iter(queue.values())) > keep_s:
                self._forget(queue)
        while self.kept_bytes > self.limits.bytes:
            self._forget(min((queue for queue in self._ended if queue), key=lambda queue: next(iter(queue.values()))))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self.sweep()

    def check_integrity(self) -> None:
        ended = {*self._ended[0], *self._ended[1]}
        assert len(ended) == self.kept
        assert self.kept_bytes == sum(self._runs[request].size for request in ended)
        for request, run in self._runs.items():
            assert run.readers or request in ended, request
            assert run.finished or not run.readers or request not in ended, request
        running = [run for request, run in self._runs.items() if request not in ended]
        assert self.memory.used >= sum(run.held for run in running)
        assert self.memory.holders >= sum(run.held > 0 for run in running)

    def _keep(self, run: Run) -> None:
        run.free()
        if run.size > self.limits.bytes:  # all others would have to go for it, and it as well
            del self._runs[run.request]
            return
        self._ended[run.keyed][run.request] = self.now()
        self.kept_bytes += run.size
        self.sweep()

    def _resume(self, failed: Run) -> Run:
        failed.free()
        self._runs[failed.request] = run = failed.resumed()
        return run

    def _forget(self, queue: OrderedDict[str, float]) -> None:
        request, _ = queue.popitem(last=False)
        self.kept_bytes -= self._runs.pop(request).size
