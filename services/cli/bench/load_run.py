"""The load: sessions of a plan, sent when they are due, each answer read to its end.

Closed loop: so many clients, each with one session at a time. Open loop: sessions begin when the plan says, whether the
ones before have ended or not. A request's times count from when it was due; so a limit on how many are sent at once
lengthens them rather than hiding what a user would have waited (coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

from kvfleet.cli.bench.answer_stream import AnswerStream, Meter
from kvfleet.cli.bench.connection import ConnectionBroken, StreamConnection, StreamConnections
from kvfleet.cli.bench.request_record import RequestRecord
from kvfleet.cli.bench.shapes import BenchSession, BenchTurn, LoadLimits

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class BenchAsk:
    """What all requests have in common."""

    model: str
    is_chat: bool
    timeout_s: float
    ignores_eos: bool = True  # asks for answers of the full length
    more: Mapping[str, Any] = field(default_factory=dict)  # fields of this server's own

    @property
    def path(self) -> str:
        return CHAT if self.is_chat else COMPLETIONS

    def body(self, said: list[dict[str, str]], output_tokens: int) -> bytes:
        prompt: dict[str, Any] = (
            {"messages": said} if self.is_chat else {"prompt": "\n\n".join(one["content"] for one in said)}
        )
        how = {"stream": True, "stream_options": {"include_usage": True}}
        full = {"ignore_eos": True} if self.ignores_eos else {}
        return orjson.dumps({"model": self.model, **prompt, "max_tokens": output_tokens, **how, **full, **self.more})


@dataclass(eq=False)
class LoadRun:
    """One event loop's. `stop` ends it: what is under way is left, and is no request of the run."""

    connections: StreamConnections
    ask: BenchAsk
    limits: LoadLimits
    records: list[RequestRecord] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)
    errors: Counter[str] = field(default_factory=Counter)
    started: int = 0
    stopped: bool = False
    began: float = 0.0
    duration_s: float = 0.0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _slots: asyncio.Semaphore | None = None
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _mistake: BaseException | None = None  # of this program, in a task

    @property
    def in_flight(self) -> int:
        return self.started - len(self.records)

    async def load(
        self, sessions: Iterator[BenchSession], arrivals: Iterator[float] | None = None, *, is_open: bool = False
    ) -> None:
        """Until its end. An open loop without `arrivals` takes the sessions' own times."""
        if is_open:
            if self.limits.concurrency:
                self._slots = asyncio.Semaphore(self.limits.concurrency)
            await self._until_over(self._arrivals(sessions, arrivals))
        else:
            await self._until_over(self._clients(sessions))

    def stop(self) -> None:
        self.stopped = True
        for task in self._tasks:
            task.cancel()

    async def _until_over(self, source: Any) -> None:
        self.began = time.perf_counter()
        self._spawn(source)
        try:
            await self._over.wait()
        finally:
            self.connections.close()
        if self._mistake is not None:
            raise self._mistake
        self.duration_s = time.perf_counter() - self.began

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (mistake := task.exception()) is not None:
            self._mistake = self._mistake or mistake
            self.stop()
        if not self._tasks:
            self._over.set()

    def _may_start(self, due: float) -> bool:
        limits = self.limits
        return (
            not self.stopped
            and (limits.requests is None or self.started < limits.requests)
            and (limits.duration_s is None or due - self.began < limits.duration_s)
        )

    async def _clients(self, sessions: Iterator[BenchSession]) -> None:
        for _ in range(self.limits.concurrency or 1):
            self._spawn(self._client(sessions))

    async def _client(self, sessions: Iterator[BenchSession]) -> None:
        while self._may_start(now := time.perf_counter()):
            session = next(sessions, None)
            if session is None:
                return
            await self._session(session, now)

    async def _arrivals(self, sessions: Iterator[BenchSession], arrivals: Iterator[float] | None) -> None:
        for session in sessions:
            at_s = session.at_s if arrivals is None else next(arrivals)
            due = self.began + (at_s or 0.0)
            if not self._may_start(due):
                return
            await _sleep_until(due)
            self._spawn(self._session(session, due))

    async def _session(self, session: BenchSession, due: float) -> None:
        said = [{"role": "system", "content": session.system}] if session.system else []
        for number, turn in enumerate(session.turns):
            if number:
                due = time.perf_counter() + turn.pause_s
                if not self._may_start(due):
                    return
                await _sleep_until(due)
            if not self._may_start(due):
                return
            said.append({"role": "user", "content": turn.text})
            self.started += 1
            answer = await self._turn(session, number, turn, said, due)
            if answer is None:  # a client whose request failed has nothing to go on with
                return
            said.append({"role": "assistant", "content": answer})

    async def _turn(
        self, session: BenchSession, number: int, turn: BenchTurn, said: list[dict[str, str]], due: float
    ) -> str | None:
        """The answer's text, None if there is none."""
        body = self.ask.body(said, turn.output_tokens)
        into = AnswerStream(self.meter)
        sent = due
        try:
            async with AsyncExitStack() as stack:
                if self._slots is not None:
                    await stack.enter_async_context(self._slots)
                sent = time.perf_counter()
                async with asyncio.timeout(self.ask.timeout_s):
                    connection = await self.connections.post(self.ask.path, body, into)
            self.connections.give_back(connection)
            error, told = _judged(connection, into)
        except asyncio.CancelledError:
            self.started -= 1
            raise
        except (OSError, ConnectionBroken, UnicodeError) as failed:  # of which TimeoutError is one
            error, told = _failed(failed, into), str(failed) or type(failed).__name__
        if error:
            self.errors[error] += 1
        at = session.number, number, due - self.began, sent - due
        self.records.append(RequestRecord(*at, error, told[:300]) if error else _measured(at, into, due))
        return None if error else "".join(into.texts)


def _measured(at: tuple[int, int, float, float], into: AnswerStream, due: float) -> RequestRecord:
    times = into.times
    told = into.count("completion_tokens")
    return RequestRecord(
        *at,
        ttft_s=times[0] - due,
        e2e_s=into.last - due,
        gaps_s=tuple(after - before for before, after in pairwise(times)),
        output_tokens=len(times) if told is None else told,
        prompt_tokens=into.count("prompt_tokens"),
        cached_tokens=into.count("prompt_tokens_details", "cached_tokens"),
    )


def _judged(connection: StreamConnection, into: AnswerStream) -> tuple[str, str]:
    """(kind of error, what was told); two empty texts for a whole answer."""
    if connection.status != 200:
        return f"HTTP {connection.status}", connection.refusal
    if into.error:
        return "error in the stream", into.error
    if into.broken:
        return "no event of OpenAI's form", into.broken
    if not (into.done or into.finished):
        return "broken stream", connection.told.decode(errors="replace") or "it has no end"
    return ("", "") if into.times else ("empty answer", "the stream has no text")


def _failed(error: Exception, into: AnswerStream) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, ConnectionBroken) or into.times:
        return "broken stream"
    return "no connection"


async def _sleep_until(due: float) -> None:
    if (left := due - time.perf_counter()) > 0:
        await asyncio.sleep(left)
