"""JetStream as buckets need it: streams with one message a key, expected revisions, times to live, limit markers, push
consumers that replay. Told in the server's own words, so that nats-py's library reads them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.dst.hub import Timer
from tests.dst.nats_link import Published
from tests.dst.subjects import matches

if TYPE_CHECKING:
    from tests.dst.nats_server import SimNats

API = "$JS.API."
SECOND = 1_000_000_000
NOT_FOUND = {"code": 404, "err_code": 10059, "description": "stream not found"}
NO_CONSUMER = {"code": 404, "err_code": 10014, "description": "consumer not found"}
EXPIRE_S = 0.1  # until what has expired is gone, at most
LIMITS = dict.fromkeys(
    ("max_memory", "max_storage", "max_streams", "max_consumers", "max_ack_pending", "memory_max_stream_bytes",
     "storage_max_stream_bytes"), -1,
) | {"max_bytes_required": False}  # fmt: skip
DATE = "2027-01-15T08:00:00Z"


@dataclass(slots=True)
class Stored:
    subject: str
    seq: int
    data: bytes
    headers: bytes
    stored_at: float
    ttl_s: float  # 0: as the stream's
    is_marker: bool = False


@dataclass(eq=False)
class Consumer:
    name: str
    config: dict[str, Any]
    delivered: int = 0
    last_seq: int = 0
    waiting: deque[Stored] = field(default_factory=deque)  # nobody listens yet
    beat: Timer | None = None


@dataclass(eq=False)
class Stream:
    config: dict[str, Any]
    seq: int = 0
    last: dict[str, Stored] = field(default_factory=dict)  # by subject, oldest first
    consumers: dict[str, Consumer] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(len(one.data) + len(one.headers) + len(one.subject) for one in self.last.values())


class JetStream:
    """`is_away`: no leader, nothing is answered."""

    def __init__(self, server: SimNats) -> None:
        self.server, self.hub = server, server.hub
        self.streams: dict[str, Stream] = {}
        self.is_away = False
        self._made = 0
        self._listeners: dict[str, tuple[Stream, Consumer]] = {}  # by where they want it

    def take(self, message: Published) -> bool:
        """Whether it was for JetStream."""
        subject = message.subject
        if subject.startswith("$KV."):
            name = f"KV_{subject.split('.', 2)[1]}"
            if self.is_away or name not in self.streams:
                return name in self.streams
            self._store(self.streams[name], message)
            return True
        if subject.startswith(API):
            if not self.is_away:
                self._ask(message, subject.removeprefix(API))
            return True
        return False

    # The API.

    def _ask(self, message: Published, what: str) -> None:
        kind, _, rest = what.partition(".")
        if kind == "DIRECT":
            self._get(message, rest.removeprefix("GET."))
            return
        said = json.loads(message.data) if message.data else {}
        verb, _, name = rest.partition(".")
        if kind == "INFO":
            told = {"memory": 0, "storage": 0, "streams": len(self.streams), "consumers": 0, "limits": LIMITS,
                    "api": {"total": 0, "errors": 0, "level": 1}}  # fmt: skip
        elif kind == "STREAM":
            told = self._stream(verb, name, said)
        elif kind == "CONSUMER":
            told = self._consumer(verb, name, said)
        else:
            told = {"error": {"code": 400, "err_code": 10025, "description": f"not simulated: {what}"}}
        self._reply(message, told)

    def _reply(self, message: Published, told: dict[str, Any]) -> None:
        if message.reply:
            self.server.answer(message.reply, json.dumps(told).encode())

    def _stream(self, verb: str, name: str, said: dict[str, Any]) -> dict[str, Any]:
        stream = self.streams.get(name)
        if verb == "CREATE" and stream is None:
            usual = {"max_consumers": -1, "max_msgs": -1, "max_bytes": -1, "max_age": 0, "num_replicas": 1,
                     "discard": "old", "storage": "file", "retention": "limits"}  # fmt: skip
            stream = self.streams[name] = Stream(
                usual | {one: value for one, value in said.items() if value is not None}
            )
        if stream is None:
            return {"error": NOT_FOUND}
        if verb == "UPDATE":
            stream.config |= said
        elif verb == "DELETE":
            del self.streams[name]
            return {"success": True}
        first = next(iter(stream.last.values())).seq if stream.last else stream.seq + 1
        state = {
            "messages": len(stream.last), "bytes": stream.bytes, "first_seq": first, "last_seq": stream.seq,
            "first_ts": DATE, "last_ts": DATE, "consumer_count": len(stream.consumers),
        }  # fmt: skip
        return {"config": stream.config, "created": DATE, "state": state}

    def _consumer(self, verb: str, rest: str, said: dict[str, Any]) -> dict[str, Any]:
        name, _, consumer = rest.partition(".")
        stream = self.streams.get(name)
        if stream is None:
            return {"error": NOT_FOUND}
        if verb == "CREATE":
            self._made += 1
            made = Consumer(f"c{self._made}", said["config"])
            stream.consumers[made.name] = made
            return self._begin(name, stream, made)
        found = stream.consumers.get(consumer)
        if found is None:
            return {"error": NO_CONSUMER}
        if verb == "DELETE":
            self._drop(stream, found)
            return {"success": True}
        return self._info(name, stream, found)

    def _info(self, name: str, stream: Stream, consumer: Consumer) -> dict[str, Any]:
        at = {"consumer_seq": consumer.delivered, "stream_seq": consumer.last_seq}
        return {
            "stream_name": name, "name": consumer.name, "created": DATE, "config": consumer.config, "delivered": at,
            "ack_floor": at, "num_ack_pending": 0, "num_redelivered": 0, "num_waiting": 0,
            "num_pending": len(consumer.waiting),
        }  # fmt: skip

    def _get(self, message: Published, rest: str) -> None:
        name, _, subject = rest.partition(".")
        stream = self.streams.get(name)
        found = None if stream is None else stream.last.get(subject)
        if found is None:
            self.server.answer(message.reply, b"", b"NATS/1.0 404 Message Not Found\r\n\r\n")
            return
        about = f"Nats-Stream: {name}\r\nNats-Subject: {subject}\r\nNats-Sequence: {found.seq}\r\n"
        about += f"Nats-Time-Stamp: {DATE}\r\n"
        self.server.answer(
            message.reply, found.data, (found.headers or b"NATS/1.0\r\n\r\n")[:-2] + about.encode() + b"\r\n"
        )

    # What is stored.

    def _store(self, stream: Stream, message: Published) -> None:
        headers = _headers(message.headers)
        before = stream.last.get(message.subject)
        wanted = headers.get("nats-expected-last-subject-sequence")
        if wanted is not None and int(wanted) != (before.seq if before is not None else 0):
            seq = before.seq if before is not None else 0
            error = {"code": 400, "err_code": 10071, "description": f"wrong last sequence: {seq}"}
            self._reply(message, {"error": error, "stream": stream.config["name"], "seq": 0})
            return
        limit = stream.config["max_bytes"]
        if limit > 0 and stream.config["discard"] == "new" and stream.bytes + len(message.data) > limit:
            error = {"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}
            self._reply(message, {"error": error, "stream": stream.config["name"], "seq": 0})
            return
        ttl = headers.get("nats-ttl", "")
        self._put(stream, message.subject, message.data, message.headers, _seconds(ttl))
        self._reply(message, {"stream": stream.config["name"], "seq": stream.seq})

    def _put(
        self, stream: Stream, subject: str, data: bytes, headers: bytes, ttl_s: float, *, is_marker: bool = False
    ) -> None:
        stream.seq += 1
        stream.last.pop(subject, None)
        stored = stream.last[subject] = Stored(subject, stream.seq, data, headers, self.hub.now, ttl_s, is_marker)
        limit = stream.config["max_bytes"]
        while limit > 0 and stream.bytes > limit and len(stream.last) > 1:
            del stream.last[next(iter(stream.last))]
        life = self._life_of(stream, stored)
        if life:
            self.hub.at(self.hub.now + life + self.hub.random.random() * EXPIRE_S, lambda: self._expire(stream, stored))
        for consumer in [*stream.consumers.values()]:
            if matches(consumer.config["filter_subject"], subject):
                consumer.waiting.append(stored)
                self._tell(stream, consumer)

    def _life_of(self, stream: Stream, stored: Stored) -> float:
        return stored.ttl_s or float(stream.config["max_age"]) / SECOND

    def _expire(self, stream: Stream, stored: Stored) -> None:
        if stream.last.get(stored.subject) is not stored:
            return
        del stream.last[stored.subject]
        life = (stream.config.get("subject_delete_marker_ttl") or 0) / SECOND
        if life and not stored.is_marker:
            headers = b"NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\nNats-TTL: %ds\r\n\r\n" % round(life)
            self._put(stream, stored.subject, b"", headers, life, is_marker=True)

    # Who is told.

    def _begin(self, name: str, stream: Stream, consumer: Consumer) -> dict[str, Any]:
        config = consumer.config
        config.setdefault("filter_subject", ">")
        start = config.get("opt_start_seq") or 0
        some = [
            one for one in stream.last.values() if matches(config["filter_subject"], one.subject) and one.seq >= start
        ]
        if config.get("deliver_policy") == "new":
            some = []
        consumer.waiting.extend(some)
        self._listeners[config["deliver_subject"]] = stream, consumer
        self._tell(stream, consumer)
        self._beat(stream, consumer)
        return self._info(name, stream, consumer)

    def listened(self, subject: str) -> None:
        """Somebody has subscribed to it."""
        if (found := self._listeners.get(subject)) is not None:
            self._tell(*found)

    def _tell(self, stream: Stream, consumer: Consumer) -> None:
        waiting = consumer.waiting
        while waiting and self.server.interest.of(consumer.config["deliver_subject"]):
            stored = waiting.popleft()
            if stream.last.get(stored.subject) is stored:  # else it has been written over
                self._push(stream, consumer, stored, len(waiting))

    def _push(self, stream: Stream, consumer: Consumer, stored: Stored, pending: int) -> None:
        consumer.delivered += 1
        consumer.last_seq = stored.seq
        stamp = int((self.hub.now + 1_800_000_000) * SECOND)
        reply = f"$JS.ACK.{stream.config['name']}.{consumer.name}.1.{stored.seq}.{consumer.delivered}.{stamp}.{pending}"
        message = Published(consumer.config["deliver_subject"], reply, stored.data, stored.headers)
        self.server.route(message, stored.subject)

    def _beat(self, stream: Stream, consumer: Consumer) -> None:
        every_s = (consumer.config.get("idle_heartbeat") or 0) / SECOND
        if consumer.name not in stream.consumers or not every_s:
            return
        told = f"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: {consumer.delivered}\r\n"
        told += f"Nats-Last-Stream: {consumer.last_seq}\r\n\r\n"
        if not self.is_away and self.server.is_up:
            reached = self.server.route(Published(consumer.config["deliver_subject"], "", b"", told.encode()))
            if not reached and consumer.beat is not None:  # nobody listens any more
                self._drop(stream, consumer)
                return
        consumer.beat = self.hub.at(self.hub.now + every_s, lambda: self._beat(stream, consumer))

    def lose_consumers(self) -> None:
        """As where the server is lost that had them: nobody is told."""
        for stream in self.streams.values():
            for consumer in [*stream.consumers.values()]:
                self._drop(stream, consumer)

    def _drop(self, stream: Stream, consumer: Consumer) -> None:
        stream.consumers.pop(consumer.name, None)
        self._listeners.pop(consumer.config["deliver_subject"], None)
        if consumer.beat is not None:
            consumer.beat.cancel()


def _headers(written: bytes) -> dict[str, str]:
    lines: Iterable[str] = written.decode().split("\r\n")[1:] if written else ()
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if value}


def _seconds(told: str) -> float:
    return float(told.removesuffix("s")) if told else 0.0
