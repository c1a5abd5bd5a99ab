"""Asks placement as an ingress does, much more often: paced, or as fast as answers come.

Bodies are encoded beforehand, answers are unpacked and not checked, so that asking costs less than answering. Pacing is
open: what is due is sent whether or not earlier answers have come. The time is from handing a request to the connection
to its answer's callback. With a deadline requests say how long their asker waits, as a Client's do.
"""

from __future__ import annotations

import asyncio
import gc
import struct
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from statistics import quantiles
from typing import Any

import msgpack

from benchmarks.placement import _fleet_prompts as prompts
from kvproto import codec
from kvproto.connection import Connection, Message
from kvproto.messages import PlaceRequest
from kvproto.subjects import INGRESS_INBOX, Subjects, inbox_prefix

INBOX = inbox_prefix(INGRESS_INBOX, "bench")
SUBJECT = Subjects().place(prompts.TENANT, prompts.MODEL)
MISSES = 5  # every fifth prompt is one that nobody has
NEW_PROMPTS = 200
PACE_S = 0.001
NUMBER = 12  # digits of a request's id
ANSWER_S = 5.0
LOOK_MS = 200  # how long a question of what is known waits; its request never comes
TOKENS = prompts.BLOCKS * prompts.BLOCK_SIZE


@dataclass
class Asked:
    """What came of some requests."""

    sent: int = 0
    seconds: list[float] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)  # of those that were answered
    asked_at: list[float] = field(default_factory=list)  # of all
    by_replica: Counter[str] = field(default_factory=Counter)
    workers: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    nobody: int = 0  # listened
    hit_tokens: int = 0  # expected, of prompts that somebody has
    hit_requests: int = 0
    took_s: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.took_s

    def useful(self, within_s: float) -> int:
        return sum(seconds <= within_s for seconds in self.seconds)

    def percentile_ms(self, share: int) -> float:
        return round(quantiles(self.seconds, n=100)[share - 1] * 1e3, 3) if len(self.seconds) > 1 else float("inf")

    def report(self) -> dict[str, Any]:
        return {
            "asked": self.sent,
            "answers_per_s": round(self.rate),
            "unanswered": self.sent - len(self.seconds) - self.refused - self.nobody,
            "refused": self.refused,
            "nobody_listened": self.nobody,
            "p50_ms": self.percentile_ms(50),
            "p99_ms": self.percentile_ms(99),
            "mean_expected_hit": round(self.hit_tokens / max(1, self.hit_requests) / TOKENS, 3),
        }


class Requester:
    """One connection; `open` first. `tells` workers what they were given."""

    def __init__(self, connection: Connection, *, tells: bool = True, deadline_s: float | None = None) -> None:
        self._connection = connection
        self._tells = tells
        self._deadline_ms = None if deadline_s is None else round(deadline_s * 1000)
        self._number = 0
        self._sent: dict[str, tuple[float, bool, asyncio.Future[dict[str, Any] | None] | None]] = {}
        self._asked = Asked()
        self._room: asyncio.Semaphore | None = None
        self._chance = Random(7)
        held = [self._body(prompts.prompt_ids(number)) for number in range(prompts.PROMPTS)]
        new = [self._body(prompts.ids(f"new {number}")) for number in range(NEW_PROMPTS)]
        self._held, self._new, self._next_new = held, new, 0

    @classmethod
    async def open(cls, url: str, *, tells: bool = True, deadline_s: float | None = None) -> Requester:
        connection = await Connection.open(url, name="bench-requester", inbox_prefix=INBOX)
        self = cls(connection, tells=tells, deadline_s=deadline_s)
        await connection.subscribe(f"{INBOX}.a.*", self._on_answer)
        await connection.synced()
        gc.collect()
        gc.freeze()
        return self

    async def close(self) -> None:
        await self._connection.close()

    @property
    def connection(self) -> Connection:
        return self._connection

    # ------------------------------------------------------------------ many

    async def paced(self, rate: float, seconds: float, *, answers_s: float = ANSWER_S) -> Asked:
        """So many a second for so long. What has no answer so much later has none."""
        self._asked = asked = Asked()
        began, owed = time.perf_counter(), 0.0
        before = began
        while before - began < seconds:
            await asyncio.sleep(PACE_S)
            now = time.perf_counter()
            owed, before = owed + (now - before) * rate, now
            while owed >= 1:
                owed -= 1
                await self._ask_any()
        asked.took_s = time.perf_counter() - began
        end = time.perf_counter() + answers_s
        while self._sent and time.perf_counter() < end:
            await asyncio.sleep(0.01)
        self._sent.clear()
        return asked

    async def saturated(self, at_once: int, seconds: float) -> Asked:
        """Always so many unanswered ones."""
        self._asked, self._room = Asked(), asyncio.Semaphore(at_once)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            await asyncio.wait_for(self._room.acquire(), ANSWER_S)
            await self._ask_any()
        asked, self._room = self._asked, None
        asked.took_s = time.perf_counter() - began
        await asyncio.sleep(0.2)
        self._sent.clear()
        return asked

    # ------------------------------------------------------------------ one

    async def blocks_known(self, worker: int) -> tuple[str, int]:
        """Which replica answered, and how many blocks of the worker's own chain it knows it to hold."""
        ask = PlaceRequest("0" * NUMBER, prompts.MODEL, prompts.own_ids(worker))
        ask = replace(ask, deadline_ms=LOOK_MS, expires_unix_ms=int(time.time() * 1000) + LOOK_MS)
        body = codec.encode(replace(ask, policy="direct", worker=prompts.name_of(worker)))
        answered: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        await self._ask(body, False, answered)
        try:
            answer = await asyncio.wait_for(answered, 1.0)
        except TimeoutError:
            return "", -1
        if answer is None:
            return "", -1
        tokens: int = sum(answer.get("expected_hit", {}).values())
        return answer["placement"], -(-tokens // prompts.BLOCK_SIZE)  # a full hit still feeds one token

    # ------------------------------------------------------------------ inside

    def _body(self, ids: tuple[int, ...]) -> bytes:
        ask = PlaceRequest("0" * NUMBER, prompts.MODEL, ids, max_tokens=50)
        if self._deadline_ms is not None:
            ask = replace(ask, deadline_ms=self._deadline_ms, expires_unix_ms=2**52)
        return codec.encode(ask)

    async def _ask_any(self) -> None:
        hits = self._number % MISSES != 0
        if hits:
            body = self._held[self._chance.randrange(len(self._held))]
        else:
            self._next_new = (self._next_new + 1) % len(self._new)
            body = self._new[self._next_new]
        self._asked.sent += 1
        await self._ask(body, hits, None)

    async def _ask(self, body: bytes, hits: bool, answered: asyncio.Future[dict[str, Any] | None] | None) -> None:
        self._number += 1
        request = f"{self._number:0{NUMBER}}"
        data = body.replace(b"0" * NUMBER, request.encode(), 1)
        if self._deadline_ms is not None:  # what is written last, eight bytes
            data = data[:-8] + struct.pack(">Q", int(time.time() * 1000) + self._deadline_ms)
        now = time.perf_counter()
        self._sent[request] = now, hits, answered
        self._asked.asked_at.append(now)
        await self._connection.publish(SUBJECT, data, reply=f"{INBOX}.a.{request}")

    async def _on_answer(self, message: Message) -> None:
        now = time.perf_counter()
        sent = self._sent.pop(message.subject.rsplit(".", 1)[-1], None)
        if self._room is not None:
            self._room.release()
        if sent is None:
            return
        sent_at, hits, answered = sent
        if not message.data:
            self._asked.nobody += 1
            if answered is not None and not answered.done():
                answered.set_result(None)
            return
        answer = msgpack.unpackb(message.data[1:])
        if answered is not None:
            if not answered.done():
                answered.set_result(answer if isinstance(answer, dict) else None)
        elif not isinstance(answer, dict):
            self._asked.refused += 1
        else:
            asked = self._asked
            asked.seconds.append(now - sent_at)
            asked.sent_at.append(sent_at)
            asked.by_replica[answer["placement"]] += 1
            asked.workers[answer["worker"]] += 1
            found = answer.get("expected_hit", {})
            if hits:
                asked.hit_requests += 1
                asked.hit_tokens += sum(found.values())
        if self._tells and isinstance(answer, dict):
            told = msgpack.packb([answer["request"], TOKENS, answer.get("expected_hit", {})])
            await self._connection.publish(f"bench.placed.{answer['worker']}", told)
