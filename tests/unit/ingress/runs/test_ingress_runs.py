"""Runs and their readers: who reads the stream, who lets go of it, and what is kept for whom and how long."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfleet.ingress.answers.native_events import NativeForm
from kvfleet.ingress.runs.jobs import Job
from kvfleet.ingress.runs.repeats import RequestName
from kvfleet.ingress.runs.runs import Run, Runs
from kvfleet.ingress.runs.transcript import Transcript
from kvfleet.ingress.settings import RunLimits
from kvproto.errors import (
    Cancelled,
    InvalidRequest,
    KvfleetError,
    LimitExceeded,
    RequestMismatch,
    SessionBusy,
    Unavailable,
)
from kvproto.messages import Continuation, Finished, FinishReason, Sampling, Started, Tokens
from kvproto.streams.generation import Generation

STARTED = Started("r", 0, "w1", 1, {})
TOTAL = 6


class Stream:
    """Brings a token whenever it is told to, from where it goes on; cancelled, what is buffered comes first."""

    def __init__(self, before: Sequence[Continuation]) -> None:
        self.begin = len(before[0].output_ids) if before else 0
        self.ready: list[Any] = [STARTED]
        self.error: KvfleetError | None = None
        self.next = self.begin
        self.more = asyncio.Event()
        self.more.set()
        self.readers = 0
        self.worker: str | None = "w1"
        self.accepted = True

    def bring(self, count: int = 1) -> None:
        for _ in range(count):
            if self.next < TOTAL:
                self.ready.append(Tokens("r", 0, 0, self.next, (self.next,), (f"t{self.next} ",)))
                self.next += 1
                if self.next == TOTAL:
                    self.ready.append(Finished("r", 0, FinishReason.LENGTH, 1, TOTAL))
        self.more.set()

    async def read(self) -> list[Any]:
        assert self.readers == 0, "two read one stream"
        self.readers += 1
        try:
            while not self.ready:
                if self.error is not None:
                    raise self.error
                self.more.clear()
                await self.more.wait()
            ready, self.ready = self.ready, []
            return ready
        finally:
            self.readers -= 1

    async def cancel(self, received: Sequence[int] | None = None) -> None:
        self.fail(Cancelled("cancelled by the client"))
        await asyncio.sleep(0)

    def fail(self, error: KvfleetError) -> None:
        self.error = self.error or error
        self.more.set()


class Turn:
    def __init__(self) -> None:
        self.held = False
        self.committed = 0
        self.refusal: KvfleetError | None = None

    async def open(self) -> None:
        assert not self.held
        await asyncio.sleep(0)
        self.held = True

    async def commit(self, transcript: Transcript) -> None:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        assert self.held
        self.held, self.committed = False, self.committed + 1

    async def abandon(self, transcript: Transcript) -> None:
        await asyncio.sleep(0)
        self.held = False


class Rig:
    def __init__(self, limits: RunLimits | None = None) -> None:
        self.now = 0.0
        self.runs = Runs(limits or RunLimits(), lambda: self.now)
        self.turn = Turn()
        self.streams: list[Stream] = []
        self.failure: KvfleetError | None = None
        self.form = NativeForm("r", "s", "p")
        self.sampling = Sampling(max_tokens=TOTAL)

    def start(self, generation: Generation, before: Sequence[Continuation]) -> Any:
        assert all(stream.error for stream in self.streams), "two streams at once"
        self.streams.append(Stream(before))
        return self.streams[-1]

    async def prepare(self) -> Job:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return Job(Generation("m", self.sampling, (1,)), self.form, self.turn)

    def come(
        self, name: str = "r", tenant: str = "t", digest: bytes = b"", *, keyed: bool = False
    ) -> tuple[Run, object]:
        said = RequestName(name, named=True, keyed=keyed)
        run = self.runs.find(tenant, said, digest)
        if run is None:
            run = Run(tenant, name, digest, keyed, self.prepare, self.start, self.runs.memory)
            self.runs.add(run)
        reader = object()
        return self.runs.attach(run, reader), reader

    async def whole(self, name: str = "r", **how: Any) -> Run:
        run, reader = self.come(name, **how)
        while not run.over:
            await run.step()
            if self.streams:
                self.streams[-1].bring(TOTAL)
        await self.runs.detach(run, reader)
        for stream in self.streams:
            stream.error = stream.error or Cancelled("over")
        return run


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_a_run_that_is_left_lets_go_and_goes_on_for_who_comes_back() -> None:
    rig = Rig()
    run, reader = rig.come()
    await run.step()  # prepared
    await run.step()  # started
    rig.streams[0].bring(2)
    await run.step()
    assert rig.turn.held
    waiting = asyncio.create_task(run.step())
    await settle()
    rig.streams[0].ready.append(Tokens("r", 0, 0, 2, (2,), ("t2 ",)))  # buffered when the client leaves
    await rig.runs.detach(run, reader)
    await waiting
    assert (rig.turn.held, rig.turn.committed, run.over, run.busy) == (False, 0, False, False)
    assert rig.streams[0].error is not None
    rig.runs.check_integrity()
    again, reader = rig.come()
    assert again is run
    while not run.over:
        await run.step()
        rig.streams[-1].bring(TOTAL)
    await rig.runs.detach(run, reader)
    assert rig.streams[1].begin == 3
    assert run.transcript.ids == tuple(range(TOTAL))
    assert run.transcript.choices[0].text == "".join(f"t{n} " for n in range(TOTAL))
    assert (rig.turn.committed, rig.runs.resumed_total) == (1, 1)
    rig.runs.check_integrity()


async def test_who_leaves_while_it_is_prepared_starts_nothing() -> None:
    rig = Rig()
    run, reader = rig.come()
    stepping = asyncio.create_task(run.step())
    await asyncio.sleep(0)
    leaving = asyncio.create_task(rig.runs.detach(run, reader))
    await asyncio.gather(stepping, leaving)
    assert not rig.streams
    assert not rig.turn.held
    rig.runs.check_integrity()


@pytest.mark.parametrize("error", [InvalidRequest("no"), Unavailable("not now")])
async def test_a_failure_is_told_to_all_and_kept_only_where_trying_again_may_help(error: KvfleetError) -> None:
    rig = Rig()
    run, one = rig.come()
    await run.step()
    await run.step()
    rig.streams[0].bring(2)
    await run.step()
    _, two = rig.come()
    rig.streams[0].fail(error)
    await run.step()
    assert run.error is error
    fresh, three = rig.come()  # before the others have noticed
    assert fresh is not run
    assert fresh.error is None
    assert len(fresh.transcript.ids) == (2 if error.retryable else 0)
    for one_run, reader in ((run, one), (run, two), (fresh, three)):
        await rig.runs.detach(one_run, reader)
    assert not rig.turn.held
    rig.runs.check_integrity()
    assert rig.runs.kept == (1 if error.retryable else 0)


async def test_what_was_refused_before_it_began_is_forgotten() -> None:
    rig = Rig()
    rig.failure = InvalidRequest("no")
    run, reader = rig.come()
    await run.step()
    assert run.error is rig.failure
    await rig.runs.detach(run, reader)
    assert rig.runs.kept == 0
    rig.failure = None
    assert (await rig.whole()).finished


async def test_a_commit_that_could_not_be_is_all_that_is_tried_again() -> None:
    rig = Rig()
    rig.turn.refusal = Unavailable("the bucket is away")
    assert (await rig.whole()).error is rig.turn.refusal
    rig.turn.refusal = None
    assert (await rig.whole()).finished
    assert (len(rig.streams), rig.turn.committed) == (1, 1)
    rig.turn.refusal = SessionBusy("lost")
    run = await rig.whole("other")
    assert run.error is rig.turn.refusal
    assert rig.runs.kept == 1
    rig.runs.check_integrity()


async def test_a_fault_of_ours_ends_it_for_everybody() -> None:
    rig = Rig()
    run, one = rig.come()
    _, two = rig.come()
    await run.step()

    async def broken() -> None:
        raise RuntimeError("a fault")

    rig.turn.open = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await run.step()
    assert run.error is not None
    assert run.error.code == "internal_error"
    for reader in (one, two):
        await rig.runs.detach(run, reader)
    assert rig.runs.kept == 0


async def test_times_and_memory() -> None:
    rig = Rig(RunLimits(grace_s=10, replay_s=100, bytes=1_000_000))
    await rig.whole("plain")
    await rig.whole("keyed", keyed=True)
    with pytest.raises(RequestMismatch, match="Idempotency-Key"):
        rig.runs.find("t", RequestName("keyed", keyed=True), b"another")
    assert rig.runs.find("other", RequestName("plain"), b"another") is None, "no word of another tenant's"
    assert rig.runs.is_foreign("other", "plain")
    rig.now = 50
    assert rig.runs.find("t", RequestName("plain"), b"") is None
    assert rig.runs.find("t", RequestName("keyed"), b"") is not None
    rig.now = 101
    assert rig.runs.find("t", RequestName("keyed"), b"") is None
    assert (rig.runs.kept, rig.runs.kept_bytes) == (0, 0)

    small = Rig(RunLimits(bytes=3 * 3000))
    for n in range(10):
        small.now = n
        await small.whole(f"r{n}", keyed=n % 2 == 0)
        small.runs.check_integrity()
    assert small.runs.kept_bytes <= 9000
    assert small.runs.find("t", RequestName("r9"), b"") is not None
    assert small.runs.find("t", RequestName("r1"), b"") is None


async def test_who_is_back_while_it_is_prepared_has_it_begun_once() -> None:
    rig = Rig()
    run, older = rig.come()
    stepping = asyncio.create_task(run.step())
    await asyncio.sleep(0)
    await run.leave(older)
    assert run.busy
    again, reader = rig.come()
    assert again is run
    await stepping
    await rig.runs.detach(run, older)
    while not run.over:
        await run.step()
        rig.streams[-1].bring(TOTAL)
    await rig.runs.detach(run, reader)
    assert (len(rig.streams), run.starts, rig.turn.committed) == (1, 1, 1)


async def test_what_is_kept_holds_no_body_and_counts_what_it_holds() -> None:
    class Body:
        pass

    rig = Rig()
    rig.form = NativeForm("r", "s", "p" * 1_000_000)
    rig.sampling = Sampling(max_tokens=TOTAL, logit_bias=dict.fromkeys(range(300), 1.0))
    body = Body()
    held, real = weakref.ref(body), rig.prepare
    rig.prepare = lambda _body=body: real()  # type: ignore[method-assign, misc]
    del body
    run, reader = rig.come()
    await run.step()
    await run.step()
    rig.prepare = real  # type: ignore[method-assign]
    await rig.runs.detach(run, reader)
    gc.collect()
    assert held() is None
    assert rig.runs.kept_bytes > 1_000_000 + 300 * 64
    assert (await rig.whole()).finished
    assert 1_000_000 < rig.runs.kept_bytes < 1_010_000
    rig.runs.check_integrity()


async def test_so_many_read_one_at_once() -> None:
    rig = Rig(RunLimits(readers=2))
    run, one = rig.come()
    rig.come()
    with pytest.raises(LimitExceeded, match="2 connections"):
        rig.come()
    await rig.runs.detach(run, one)
    rig.come()


@settings(max_examples=120, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["come", "leave", "bring", "settle"])), max_size=40))
def test_whoever_comes_and_goes_whenever(moves: list[tuple[int, str]]) -> None:
    """Readers come and leave at any moment: one stream at a time, one commit, and everybody who stays gets it all."""

    async def play() -> None:
        rig = Rig()
        tasks: dict[int, asyncio.Task[tuple[int, ...]]] = {}
        readers: dict[int, tuple[Run, object]] = {}

        async def follow(run: Run, reader: object) -> tuple[int, ...]:
            try:
                while reader in run.readers and not run.over:
                    if run.busy:
                        await run.changed()
                    else:
                        await run.step()
                assert run.error is None
                return run.transcript.ids
            finally:
                await rig.runs.detach(run, reader)

        for who, move in moves:
            if move == "come" and who not in tasks:
                readers[who] = rig.come()
                tasks[who] = asyncio.create_task(follow(*readers[who]))
            elif move == "leave" and who in tasks:
                run, reader = readers[who]
                await run.leave(reader)
                await tasks.pop(who) if not run.readers else tasks.pop(who)
                if not run.readers and not run.over:
                    await settle()
                    assert not rig.turn.held, "nothing is held for nobody"
                    assert all(stream.error for stream in rig.streams), "nothing runs for nobody"
            elif move == "bring" and rig.streams:
                rig.streams[-1].bring()
            await (settle() if move == "settle" else asyncio.sleep(0))
        while not all(task.done() for task in tasks.values()):
            if rig.streams:
                rig.streams[-1].bring()
            await settle()
        for task in tasks.values():
            assert await task == tuple(range(TOTAL))
        assert rig.turn.committed == (1 if tasks or rig.turn.committed else 0)
        assert not rig.turn.held
        await settle()
        rig.runs.check_integrity()

    asyncio.run(play())


async def test_who_is_refused_after_a_look_leaves_nothing_behind() -> None:
    """A run has failed and its reader is being told; somebody looks for it, and is not admitted."""
    rig = Rig()
    run, reader = rig.come()
    await run.step()
    await run.step()
    rig.streams[0].fail(Unavailable("gone"))
    await run.step()
    assert run.error is not None
    for _ in range(2):
        assert rig.runs.find("t", RequestName("r"), b"") is run
        rig.runs.check_integrity()
    again, other = rig.come()
    assert (again is run, again.error, again.readers) == (False, None, {other})
    rig.runs.check_integrity()
    await rig.runs.detach(run, reader)
    await rig.runs.detach(again, other)
    rig.runs.check_integrity()
    rig.now += RunLimits().grace_s + 1
    rig.runs.sweep()
    assert rig.runs.find("t", RequestName("r"), b"") is None
