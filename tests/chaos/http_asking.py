"""Loop: one request over HTTP, as a load balancer and an SDK would carry it, written down as the caller saw it.

refused (no connection, 429, 503)  ──▶ another ingress, a little later: nothing was promised yet
accepted, then the connection broke ──▶ another ingress with Last-Event-ID: the same stream goes on
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx

from tests.chaos.behaviour import Behaviour
from tests.chaos.cases import Case
from tests.chaos.fleet import key_of
from tests.chaos.history import End, Exchange, Piece, Transport
from tests.support import sse

Clock = Callable[[], float]

RETRY_S = 0.25
LONGEST_RETRY_S = 1.0  # of what Retry-After says: a run has no time for more
ROUTES = {
    Transport.CHAT: "/v1/chat/completions",
    Transport.COMPLETIONS: "/v1/completions",
    Transport.GENERATE: "/generate",
    Transport.BACKGROUND: "/v1/responses",
}
EVENT_IDS = "text/event-stream; event-ids=1"
CONNECT_S = 1.0


class _Broke(Exception):
    """The connection ended before the answer did."""


class _Cut(Exception):
    """It was the client that broke it."""


class HttpClients:
    """Shared by all HTTP clients of a run: the ingresses, and connections to them. Close it. `transport`: in place of
    sockets."""

    def __init__(self, bases: Mapping[str, str], now: Clock, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._bases = dict(bases)
        self._turn = itertools.cycle(self._bases)
        self._now = now
        self._client = httpx.AsyncClient(
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            transport=transport,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self, case: Case, behaviour: Behaviour, exchange: Exchange, *, session: str = "", key: str | None = None
    ) -> None:
        """Until its end. `key`: an Idempotency-Key. What broke is gone on with by its event ids, or asked anew where
        nothing has come."""
        body = case.http_body(exchange.turn, stream=not behaviour.whole, session=session)
        headers = {"Authorization": f"Bearer {key_of(case.tenant)}", "Accept": EVENT_IDS}
        if key is not None:
            headers["Idempotency-Key"] = key
        caller = _Caller(exchange, case.transport, behaviour, self._now)
        end = self._now() + case.limit_s
        ingress = next(self._turn)
        while not exchange.ends and exchange.left_at is None and self._now() < end:
            wait_s = RETRY_S
            try:
                said = await self._once(ingress, case, body, headers | caller.position(), caller)
                if said is not None:
                    wait_s = said
            except _Cut:
                wait_s = 0.05
            except httpx.ConnectError:
                exchange.refusals.append((self._now(), f"{ingress}: no connection"))
            except (_Broke, httpx.TransportError) as error:
                if session and key is None and not caller.events:
                    exchange.left_at = self._now()  # the session may have this turn already: asking again adds another
                elif exchange.accepted_at is None or (behaviour.whole and not exchange.ends):
                    exchange.refusals.append((self._now(), f"{ingress}: {type(error).__name__}"))
                else:
                    exchange.broken.append((self._now(), ingress))
                    if not caller.may_return:
                        break
            ingress = next(self._turn)
            if not exchange.ends and exchange.left_at is None:
                await asyncio.sleep(wait_s)
        exchange.done_at = self._now()

    async def ask_in_background(self, case: Case, exchange: Exchange, *, key: str) -> None:
        """Begins it at one ingress, and asks all of them for it until it has ended."""
        body = case.http_body(0, stream=False)
        headers = {"Authorization": f"Bearer {key_of(case.tenant)}"}
        end = self._now() + case.limit_s
        while not exchange.ends and self._now() < end:
            ingress = next(self._turn)
            url = self._bases[ingress] + ROUTES[case.transport]
            timeout = httpx.Timeout(case.limit_s, connect=CONNECT_S)
            try:
                if exchange.accepted_at is None:
                    answer = await self._client.post(
                        url, json=body, headers={**headers, "Idempotency-Key": key}, timeout=timeout
                    )
                else:
                    answer = await self._client.get(f"{url}/resp_{exchange.request}", headers=headers, timeout=timeout)
            except httpx.TransportError as error:
                exchange.refusals.append((self._now(), f"{ingress}: {type(error).__name__}"))
                await asyncio.sleep(RETRY_S)
                continue
            if answer.status_code in (429, 503):
                exchange.refusals.append((self._now(), f"{ingress}: {answer.status_code}"))
            elif answer.status_code != 200:
                exchange.ends.append(End(self._now(), str(answer.status_code), answer.text[:300]))
            else:
                self._noted(answer.json(), exchange, ingress)
            await asyncio.sleep(RETRY_S)
        exchange.done_at = self._now()

    async def delete(self, path: str, tenant: str) -> bool:
        """Whether it is gone, by an ingress's word."""
        url, headers = f"{self._bases[next(self._turn)]}/{path}", {"Authorization": f"Bearer {key_of(tenant)}"}
        try:
            answer = await self._client.delete(url, headers=headers, timeout=httpx.Timeout(10.0, connect=CONNECT_S))
        except httpx.TransportError:
            return False
        return answer.status_code in (200, 404)

    def _noted(self, told: dict[str, Any], exchange: Exchange, ingress: str) -> None:
        at = self._now()
        if exchange.accepted_at is None:
            exchange.accepted_at, exchange.request = at, told["id"].removeprefix("resp_")
            exchange.ingresses.append((at, ingress))
        if told["status"] in ("completed", "incomplete"):
            text = "".join(part["text"] for item in told["output"] for part in item["content"])
            exchange.pieces.append(Piece(at, 0, text))
            exchange.reasons[0] = "stop" if told["status"] == "completed" else "length"
            exchange.cached_tokens = told["kvfleet"]["cached_tokens"]
            exchange.workers.append((at, told["kvfleet"]["worker_id"]))
            exchange.ends.append(End(at, output_tokens=told["usage"]["output_tokens"]))
        elif told["status"] not in ("queued", "in_progress"):
            exchange.ends.append(End(at, told["status"], str(told["error"])))

    async def _once(
        self, ingress: str, case: Case, body: dict[str, Any], headers: dict[str, str], caller: _Caller
    ) -> float | None:
        """One connection. Returns seconds to wait where it was refused. Raises _Broke, _Cut, httpx.TransportError."""
        exchange = caller.exchange
        url = self._bases[ingress] + ROUTES[case.transport]
        timeout = httpx.Timeout(case.limit_s, connect=CONNECT_S)
        async with self._client.stream("POST", url, json=body, headers=headers, timeout=timeout) as response:
            if response.status_code in (409, 429, 503):
                await response.aread()
                code = response.json()["error"]["code"]
                exchange.refusals.append((self._now(), f"{ingress}: {response.status_code} {code}"))
                if response.status_code == 503 and "retry-after" not in response.headers:
                    exchange.ends.append(End(self._now(), code, "503 without Retry-After"))
                return min(float(response.headers.get("retry-after", RETRY_S)), LONGEST_RETRY_S)
            if response.status_code != 200:
                await response.aread()
                exchange.ends.append(End(self._now(), str(response.status_code), response.text[:300]))
                return None
            at = self._now()
            if exchange.accepted_at is None:
                exchange.accepted_at = at
            elif not caller.behaviour.whole:
                exchange.resumed += 1
            exchange.ingresses.append((at, ingress))
            if worker := response.headers.get("x-kvfleet-worker"):
                exchange.workers.append((at, worker))
            if caller.behaviour.whole:
                await response.aread()
                caller.whole(response.json())
                return None
            async with contextlib.aclosing(_events(response)) as events:
                async for event_id, data in events:
                    caller.event(event_id, data)
                    if exchange.left_at is not None:
                        return None
                    await caller.behaviour.pause()
            if not exchange.ends:
                raise _Broke
            return None


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Id and data of each event."""
    event_id = ""
    async for line in sse.alines(response):
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            yield event_id, line[6:]


class _Caller:
    """What one caller has of its answer, over all its connections."""

    def __init__(self, exchange: Exchange, transport: Transport, behaviour: Behaviour, now: Clock) -> None:
        self.exchange = exchange
        self.behaviour = behaviour
        self._transport = transport
        self._now = now
        self._last_id = ""
        self.events = 0
        self._has_cut = False
        self._finished = False

    def position(self) -> dict[str, str]:
        return {"Last-Event-ID": self._last_id} if self._last_id else {}

    @property
    def may_return(self) -> bool:
        """From where it is, or as nothing has come yet."""
        return bool(self._last_id) or not self.events

    def event(self, event_id: str, data: str) -> None:
        """One server-sent event. Raises _Cut where this client breaks its connection."""
        exchange, at = self.exchange, self._now()
        if exchange.ends:
            exchange.after_end += 1
        self._last_id = event_id or self._last_id
        self.events += 1
        if data == "[DONE]":
            self._end(at)
            return
        value = json.loads(data)
        if self._transport is Transport.GENERATE:
            self._native(value, at)
        else:
            self._openai(value, at)
        if self.behaviour.leaves_after is not None and self.events >= self.behaviour.leaves_after:
            exchange.left_at = at
        if self.behaviour.cuts_after == self.events and not self._has_cut and not exchange.ends and self._last_id:
            self._has_cut = True
            raise _Cut

    def whole(self, value: dict[str, Any]) -> None:
        """An answer that was not streamed."""
        exchange, at = self.exchange, self._now()
        if self._transport is Transport.GENERATE:
            raise AssertionError("/generate always streams")
        for choice in value["choices"]:
            text = _said(choice["message"]) if self._transport is Transport.CHAT else choice["text"]
            exchange.pieces.append(Piece(at, choice["index"], text))
            exchange.reasons[choice["index"]] = choice["finish_reason"]
            self._logprobs(choice)
        exchange.cached_tokens = value["kvfleet"]["cached_tokens"]
        exchange.request = value["kvfleet"]["request_id"]
        exchange.ends.append(End(at, output_tokens=value["usage"]["completion_tokens"]))

    def _native(self, value: dict[str, Any], at: float) -> None:
        exchange, kind = self.exchange, value["type"]
        if kind == "start":
            exchange.request = value["request_id"]
            exchange.cached_tokens = value["cached_tokens"]
            exchange.workers.append((at, value["worker_id"]))
        elif kind == "token":
            exchange.pieces.append(Piece(at, 0, value["token"], (value["token_id"],)))
            if "logprob" in value:
                exchange.logprobs.setdefault(0, []).append(value["logprob"])
        elif kind == "done":
            exchange.reasons[0] = value["finish_reason"]
            exchange.ends.append(End(at, output_tokens=value["tokens_generated"]))
        else:
            exchange.ends.append(End(at, value["code"], value["error"]))

    def _openai(self, value: dict[str, Any], at: float) -> None:
        exchange = self.exchange
        if "error" in value:
            exchange.ends.append(End(at, value["error"]["code"], value["error"]["message"]))
            return
        exchange.request = value["id"].partition("-")[2]
        for choice in value["choices"]:
            text = _said(choice["delta"]) if self._transport is Transport.CHAT else choice["text"]
            if text:
                exchange.pieces.append(Piece(at, choice["index"], text))
            self._logprobs(choice)
            if choice["finish_reason"] is not None:
                if choice["index"] in exchange.reasons:
                    exchange.after_end += 1
                exchange.reasons[choice["index"]] = choice["finish_reason"]
        if "worker_id" in value["kvfleet"]:
            exchange.cached_tokens = value["kvfleet"]["cached_tokens"]
            exchange.workers.append((at, value["kvfleet"]["worker_id"]))
            self._finished = True

    def _logprobs(self, choice: dict[str, Any]) -> None:
        said = choice.get("logprobs")
        if not said:
            return
        values = [one["logprob"] for one in said["content"]] if "content" in said else list(said["token_logprobs"])
        self.exchange.logprobs.setdefault(choice["index"], []).extend(values)

    def _end(self, at: float) -> None:
        if self._finished:
            self.exchange.ends.append(End(at))
        else:
            self.exchange.ends.append(End(at, "done_without_finish", "[DONE] came before the answer's last chunk"))


def _said(message: dict[str, Any]) -> str:
    """Of a message or a part of it: its text, and its calls."""
    calls = (call["function"] for call in message.get("tool_calls", ()))
    return (message.get("content") or "") + "".join(one.get("name", "") + one["arguments"] for one in calls)
