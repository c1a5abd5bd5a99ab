"""Loop: one request by `kvproto.Client` or by a bare producer, written down as its client saw it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import msgpack

from kvproto.client import Client, Generation
from kvproto.connection import JSON_HEADER, Connection, Message, is_no_responders
from kvproto.errors import KvfleetError
from kvproto.ids import new_request_id
from kvproto.messages import AssistantDelta, ChoiceFinished, Finished, Started, Tokens
from kvproto.schema import to_map
from kvproto.subjects import Subjects
from tests.chaos.behaviour import Behaviour
from tests.chaos.cases import Case
from tests.chaos.history import End, Exchange, Piece, Transport

Clock = Callable[[], float]

REFUSED_S = 0.3  # before a refused one is tried again
REFUSALS = ("no_responders", "no_workers", "unavailable", "draining", "limit_exceeded")


async def ask_client(client: Client, case: Case, behaviour: Behaviour, exchange: Exchange, now: Clock) -> None:
    """Through the harness's own `Client`. What is refused before any worker took it on is asked for again."""
    end = now() + case.limit_s
    while not await _ask_once(client, case, behaviour, exchange, now) and now() < end:
        await asyncio.sleep(REFUSED_S)
    exchange.done_at = now()


async def _ask_once(client: Client, case: Case, behaviour: Behaviour, exchange: Exchange, now: Clock) -> bool:
    """Whether it has ended; else it was refused."""
    generation = Generation(
        case.model,
        case.sampling_of(),
        case.ids,
        prompt=case.turns[0] if case.turns else None,
        tenant=case.tenant,
        priority=case.priority,
        deadline_s=case.limit_s,
        chat=case.chat,
    )
    stream = client.generate(generation)
    exchange.request = stream.request
    tokens = 0
    try:
        async with asyncio.timeout(case.limit_s + 5.0), stream:
            while events := await stream.read():
                at = now()
                worker = stream.worker or ""
                if not exchange.workers or exchange.workers[-1][1] != worker:
                    exchange.workers.append((at, worker))
                for event in events:
                    tokens += _take(event, exchange, at)
                if behaviour.leaves_after is not None and tokens >= behaviour.leaves_after and not exchange.ends:
                    exchange.left_at = at
                    break
                await behaviour.pause()
    except KvfleetError as error:
        if error.retryable and (
            (error.code in REFUSALS and not stream.attempts)
            or (exchange.accepted_at is None and now() - exchange.began > generation.patience_s)
        ):
            exchange.refusals.append((now(), error.code))
            return False
        exchange.ends.append(End(now(), error.code, str(error), error.retryable))
    except TimeoutError:
        pass  # no end: the checker says so
    return True


def _take(event: Any, exchange: Exchange, at: float) -> int:
    if exchange.ends:
        exchange.after_end += 1
    if isinstance(event, Tokens):
        text = "".join(event.text) if not event.deltas else "".join(map(_said, event.deltas))
        exchange.pieces.append(Piece(at, event.choice, text, tuple(event.ids), event.index))
        if event.logprobs:
            exchange.logprobs.setdefault(event.choice, []).extend(one.logprob for one in event.logprobs)
        return len(event.ids)
    if isinstance(event, Started):
        exchange.accepted_at, exchange.cached_tokens = at, event.cached_tokens
    elif isinstance(event, ChoiceFinished):
        exchange.reasons[event.choice] = event.reason.value
    elif isinstance(event, Finished):
        exchange.reasons.setdefault(0, event.reason.value)
        exchange.ends.append(End(at, output_tokens=event.output_tokens))
    return 0


def _said(delta: AssistantDelta) -> str:
    calls = (f"{call.name}{call.arguments}" for call in delta.tool_calls)
    return "".join((delta.content, delta.reasoning_content, *calls))


class BareProducer:
    """One connection of a producer without our code: frames are maps, in msgpack or JSON, on an inbox per request."""

    def __init__(self, connection: Connection, subjects: Subjects, now: Clock) -> None:
        self._connection = connection
        self._subjects = subjects
        self._now = now

    async def ask(self, case: Case, behaviour: Behaviour, exchange: Exchange) -> None:
        """Until its terminal frame. What is refused before it was accepted is asked for again."""
        as_json = exchange.transport is Transport.BARE_JSON
        end = self._now() + case.limit_s
        while True:
            request = exchange.request = new_request_id()
            inbox = f"{self._connection.inbox_prefix}.{os.urandom(6).hex()}"
            frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

            async def on_frame(message: Message, frames: asyncio.Queue[dict[str, Any]] = frames) -> None:
                frames.put_nowait(_frame(message, as_json=as_json))

            subscription = await self._connection.subscribe(inbox, on_frame)
            try:
                body = {k: v for k, v in to_map(case.producer_request(request), packed=False).items() if v is not None}
                data = json.dumps(body).encode() if as_json else msgpack.packb(body)
                await self._connection.publish(
                    self._subjects.generate(case.tenant, case.model),
                    data,
                    reply=inbox,
                    headers=JSON_HEADER if as_json else None,
                )
                if await self._read(frames, exchange, behaviour, end) or self._now() > end:
                    break
            finally:
                await subscription.unsubscribe()
            await asyncio.sleep(REFUSED_S)
        exchange.done_at = self._now()

    async def _read(
        self, frames: asyncio.Queue[dict[str, Any]], exchange: Exchange, behaviour: Behaviour, end: float
    ) -> bool:
        """Whether it has ended; else it was refused, or nobody took it on. Frames of an older attempt are nobody's."""
        accepted, attempt = False, 0
        while True:
            left = end - self._now() if accepted else min(2.0, end - self._now())
            try:
                frame = await asyncio.wait_for(frames.get(), max(left, 0.01))
            except TimeoutError:
                if not accepted:
                    exchange.refusals.append((self._now(), "silence"))
                return accepted
            at, kind = self._now(), frame["type"]
            refused = kind == "failed" and frame["code"] in REFUSALS
            if refused and not exchange.pieces:
                exchange.refusals.append((at, frame["code"]))
                exchange.accepted_at = None
                return False
            if frame.get("attempt", 0) < attempt:
                continue
            attempt = frame.get("attempt", 0)
            accepted = True
            if exchange.accepted_at is None:
                exchange.accepted_at = at
            if frame.get("worker") and (not exchange.workers or exchange.workers[-1][1] != frame["worker"]):
                exchange.workers.append((at, frame["worker"]))
            if self._take(frame, exchange, at):
                await asyncio.sleep(0.2)  # for what must not come any more
                while not frames.empty():
                    if (late := frames.get_nowait()).get("attempt", 0) >= attempt:
                        exchange.after_end += 1
                        exchange.late.append(str(late)[:300])
                return True
            await behaviour.pause()

    @staticmethod
    def _take(frame: dict[str, Any], exchange: Exchange, at: float) -> bool:
        kind = frame["type"]
        if kind == "tokens":
            if frame["index"] == 0 and exchange.pieces:  # nobody had heard that the attempt before was accepted
                exchange.pieces = [piece for piece in exchange.pieces if piece.choice != frame["choice"]]
                exchange.logprobs.pop(frame["choice"], None)
            text = "".join(frame["text"])
            exchange.pieces.append(Piece(at, frame["choice"], text, tuple(frame["ids"]), frame["index"]))
            if frame.get("logprobs"):
                values = [one["logprob"] for one in frame["logprobs"]]
                exchange.logprobs.setdefault(frame["choice"], []).extend(values)
        elif kind == "started":
            exchange.cached_tokens = sum(frame["cached"].values())
        elif kind == "choicefinished":
            exchange.reasons[frame["choice"]] = frame["reason"]
        elif kind == "finished":
            exchange.reasons.setdefault(0, frame["reason"])
            exchange.ends.append(End(at, output_tokens=frame["output_tokens"]))
            return True
        elif kind in ("failed", "moved"):
            code = frame.get("code", kind)
            exchange.ends.append(End(at, code, frame.get("message", ""), bool(frame.get("retryable"))))
            return True
        return False


def _frame(message: Message, *, as_json: bool) -> dict[str, Any]:
    if is_no_responders(message):
        return {"type": "failed", "code": "no_responders"}
    found: dict[str, Any] = json.loads(message.data) if as_json else msgpack.unpackb(message.data)
    return found
