"""A nats-server, simulated: subjects, queue groups, headers, no responders, rights, limits and JetStream's buckets.

It has no process of its own: what arrives is handled at once, and every answer takes its link's time. Where it and the
real server differ the real one is right: `tests/dst/test_nats_alike.py` asks both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.dst.hub import Hub
from tests.dst.jetstream import JetStream
from tests.dst.nats_link import _END, Delivered, Published, SimTransport
from tests.dst.subjects import Interest, any_matches, covers

VERSION = "2.15.0"
MAX_PAYLOAD = 1_048_576
MAX_PENDING = 64 * 1_048_576  # bytes on their way to a client that does not read
MAIN, SYSTEM = "F", "SYS"  # accounts: what the second one hears is of connections alone
LINK = ("kvf.region.>", "_ing.*.b", "_ing.*.r.>", "_ing.*.*.*", "_plc.*.*.*", "_prd.>")  # region-link.conf
BETWEEN_S = 0.02  # between regions, one way
NO_RESPONDERS = b"NATS/1.0 503\r\n\r\n"


@dataclass(frozen=True, slots=True)
class May:
    """Patterns. None: anything."""

    publish: Sequence[str] | None = None
    subscribe: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class User:
    password: str
    may: May
    account: str = MAIN


@dataclass(eq=False, slots=True)
class Subscribed:
    client: Attached
    sid: int
    subject: str
    queue: str
    left: int | None = None  # messages until it ends by itself


@dataclass(eq=False)
class Attached:
    """A client's connection, as the server has it."""

    transport: SimTransport
    id: int
    name: str = ""
    user: str = ""
    account: str = MAIN
    may: May = field(default_factory=May)
    subscriptions: dict[int, Subscribed] = field(default_factory=dict)
    is_known: bool = False  # has sent a CONNECT that was taken
    publishes: dict[str, bool] = field(default_factory=dict)  # subject -> it may


@dataclass(eq=False, slots=True)
class Beyond:
    """The server of another region, and what passes to it: deploy/nats says the same to both sides."""

    server: SimNats
    is_apart: bool = False
    _passes: dict[str, bool] = field(default_factory=dict)

    def passes(self, subject: str) -> bool:
        if self.is_apart or not self.server.is_up or self.server.is_hung:
            return False
        known = self._passes.get(subject)
        if known is None:
            if len(self._passes) > 4096:
                self._passes.clear()
            known = self._passes[subject] = any_matches(LINK, subject)
        return known


class SimNats:
    """`users`: by name; none: anybody may do anything."""

    def __init__(self, hub: Hub, url: str, users: dict[str, User] | None = None) -> None:
        self.hub, self.url, self.users = hub, url, users or {}
        self.is_up, self.is_hung = True, False
        self.latency_range_s = (0.0001, 0.001)
        self.clients: dict[SimTransport, Attached] = {}
        self.interest: Interest[Subscribed] = Interest()
        self.system_interest: Interest[Subscribed] = Interest()
        self.jetstream = JetStream(self)
        self.beyond: list[Beyond] = []
        self.on_message: Callable[[Attached, Published], None] = lambda client, message: None
        self.on_delivery: Callable[[Published, Subscribed], int] = lambda message, to: 1  # copies, a fault's
        self._ids = 0
        self._due_beyond = 0.0

    def latency_s(self) -> float:
        low, high = self.latency_range_s
        return low + self.hub.random.random() * (high - low)

    # Connections.

    def greet(self, transport: SimTransport) -> None:
        self._ids += 1
        self.clients[transport] = Attached(transport, self._ids)
        info = {
            "server_id": "S", "version": VERSION, "headers": True, "max_payload": MAX_PAYLOAD, "client_id": self._ids,
            "auth_required": bool(self.users), "jetstream": True,
        }  # fmt: skip
        transport.to_client.send([b"INFO " + json.dumps(info).encode() + b"\r\n"])

    def read(self, transport: SimTransport, parts: list[Any]) -> None:
        client = self.clients.get(transport)
        for part in parts:
            if client is None or transport not in self.clients:
                return
            if type(part) is Published:
                self._publish(client, part)
            elif part == _END:
                self.lost(transport)
            else:
                self._command(client, part.split())

    def lost(self, transport: SimTransport) -> None:
        """The client is gone."""
        client = self.clients.pop(transport, None)
        if client is None:
            return
        for one in client.subscriptions.values():
            self._interest_of(client).drop(one.subject, one)
        client.subscriptions.clear()
        if client.is_known:
            self._tell(client, "DISCONNECT")

    def _tell(self, client: Attached, what: str) -> None:
        """To the system account."""
        subject = f"$SYS.ACCOUNT.{client.account}.{what}"
        told = json.dumps({"client": {"acc": client.account, "id": client.id, "name": client.name}}).encode()
        for one in self.system_interest.of(subject):
            self._deliver(one, subject.encode(), b"", Published(subject, "", told, b""))

    def close(self, client: Attached, why: str = "") -> None:
        """Let a client go."""
        transport = client.transport
        self.lost(transport)
        transport.to_client.send([*([f"-ERR '{why}'\r\n".encode()] if why else []), _END])

    def kill(self) -> None:
        """It is killed: its clients' connections are reset. What JetStream has stays."""
        self.is_up = False
        for client in list(self.clients.values()):
            client.transport.lose()
            self.lost(client.transport)

    def start(self) -> None:
        self.is_up = True

    def hang(self) -> None:
        self.is_hung = True
        for transport in self.clients:
            transport.to_server.hold()
            transport.to_client.hold()

    def wake(self) -> None:
        self.is_hung = False
        for transport in list(self.clients):
            transport.to_server.let_go()
            transport.to_client.let_go()

    # What clients say.

    def _command(self, client: Attached, words: list[bytes]) -> None:
        name = words[0]
        if name == b"CONNECT":
            self._connect(client, json.loads(b" ".join(words[1:])))
        elif name == b"PING":
            client.transport.to_client.send([b"PONG\r\n"])
        elif name == b"SUB":
            queue = words[2].decode() if len(words) == 4 else ""
            self._subscribe(client, words[1].decode(), queue, int(words[-1]))
        elif name == b"UNSUB":
            self._unsubscribe(client, int(words[1]), int(words[2]) if len(words) > 2 else 0)

    def _connect(self, client: Attached, said: dict[str, Any]) -> None:
        client.name = said.get("name") or ""
        if self.users:
            known = self.users.get(said.get("user") or "")
            if known is None or known.password != said.get("pass"):
                self.close(client, "Authorization Violation")
                return
            client.user, client.may, client.account = said["user"], known.may, known.account
        client.is_known = True
        self._tell(client, "CONNECT")

    def _subscribe(self, client: Attached, subject: str, queue: str, sid: int) -> None:
        may = client.may.subscribe
        if may is not None and not any(covers(one, subject) for one in may):
            client.transport.to_client.send(
                [f"-ERR 'Permissions Violation for Subscription to \"{subject}\"'\r\n".encode()]
            )
            return
        if sid in client.subscriptions:  # said twice, as nats-py does when it reconnects: it counts once
            return
        made = client.subscriptions[sid] = Subscribed(client, sid, subject, queue)
        self._interest_of(client).put(subject, made)
        self.jetstream.listened(subject)

    def _unsubscribe(self, client: Attached, sid: int, most: int) -> None:
        found = client.subscriptions.get(sid)
        if found is None:
            return
        if most:
            found.left = most
        else:
            self._end(found)

    def _end(self, subscribed: Subscribed) -> None:
        subscribed.client.subscriptions.pop(subscribed.sid, None)
        self._interest_of(subscribed.client).drop(subscribed.subject, subscribed)

    def _interest_of(self, client: Attached) -> Interest[Subscribed]:
        return self.interest if client.account == MAIN else self.system_interest

    def _publish(self, client: Attached, message: Published) -> None:
        if len(message.data) + len(message.headers) > MAX_PAYLOAD:
            self.close(client, "Maximum Payload Violation")
            return
        may, subject = client.may.publish, message.subject
        if may is not None:
            allowed = client.publishes.get(subject)
            if allowed is None:
                if len(client.publishes) > 4096:
                    client.publishes.clear()
                allowed = client.publishes[subject] = any_matches(may, subject)
            if not allowed:
                told = f"-ERR 'Permissions Violation for Publish to \"{subject}\"'\r\n"
                client.transport.to_client.send([told.encode()])
                return
        self.on_message(client, message)
        reached = self.route(message)
        for one in self.beyond:
            if one.passes(subject) and one.server.interest.of(subject):
                reached += 1
                due = self.hub.now + self.latency_s() + BETWEEN_S
                self._due_beyond = due = max(due, self._due_beyond)  # in order
                self.hub.at(due, partial(one.server.come, message))
        if self.jetstream.take(message):
            return
        if not reached and message.reply:
            self._no_responders(client, message)

    def _no_responders(self, client: Attached, message: Published) -> None:
        for one in self.interest.of(message.reply):
            if one.client is client:
                reply = (one.sid, message.reply.encode(), b"", b"", NO_RESPONDERS)
                client.transport.to_client.send([Delivered(*reply)])

    # What they hear.

    def come(self, message: Published) -> None:
        """From another region."""
        if self.is_up and not self.is_hung:
            self.route(message)

    def route(self, message: Published, shown: str = "") -> int:
        """To whom subscribed. `shown`: the subject that they see. Returns how many that are."""
        found = self.interest.of(message.subject)
        if not found:
            return 0
        alone = [one for one in found if not one.queue]
        if len(alone) < len(found):
            groups: dict[tuple[str, str], list[Subscribed]] = {}
            for one in found:
                if one.queue:
                    groups.setdefault((one.subject, one.queue), []).append(one)
            alone += [self.hub.random.choice(some) for some in groups.values()]
        subject, reply = (shown or message.subject).encode(), message.reply.encode()
        for one in alone:
            for _ in range(self.on_delivery(message, one)):
                self._deliver(one, subject, reply, message)
        return len(alone)

    def _deliver(self, one: Subscribed, subject: bytes, reply: bytes, message: Published) -> None:
        link = one.client.transport.to_client
        link.send([Delivered(one.sid, subject, reply, message.data, message.headers)])
        if link.unread > MAX_PENDING:
            self.close(one.client, "Slow Consumer")
        if one.left is not None:
            one.left -= 1
            if one.left <= 0:
                self._end(one)

    def answer(self, subject: str, data: bytes, headers: bytes = b"") -> None:
        """From the server itself."""
        self.route(Published(subject, "", data, headers))
