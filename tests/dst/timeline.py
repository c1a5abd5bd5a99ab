"""Who sent what to whom, and when, of what a failure is about: one line for each message."""

from __future__ import annotations

from typing import Any

from kvproto import codec
from kvproto.errors import KvfleetError
from kvproto.schema import to_map
from tests.dst.nats_link import Published
from tests.dst.nats_server import Attached, SimNats

SHORT = 100  # characters of a field, at most


class Timeline:
    """Keeps messages of core NATS as they come to a server; `about` reads those that name a request."""

    def __init__(self, servers: list[SimNats]) -> None:
        self._kept: list[tuple[float, str, str, bytes]] = []
        self._hub = servers[0].hub
        for server in servers:
            server.on_message = self._keep

    def _keep(self, client: Attached, message: Published) -> None:
        self._kept.append((self._hub.now, client.transport.place.name, message.subject, message.data))

    def about(self, requests: set[str], began: float) -> list[tuple[float, str]]:
        names = [request.encode() for request in requests if request]
        return [
            (at - began, f"{sender} ──▶ {subject}: {told(data)}")
            for at, sender, subject, data in self._kept
            if any(name in data for name in names)
        ]


def told(data: bytes) -> str:
    """What a message says, in short."""
    for read in (_frames, codec.open_map, lambda data: codec.decode_plain_frame(data, as_json=data[:1] == b"{")):
        try:
            return _short(read(data))
        except (KvfleetError, ValueError, TypeError, KeyError, IndexError):
            continue
    return f"{len(data)} bytes"


def _frames(data: bytes) -> list[Any]:
    return [{"": type(frame).__name__, **to_map(frame, packed=False)} for frame in codec.decode_frames(data)]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_short, value))
    fields = value if isinstance(value, dict) else {"": type(value).__name__, **to_map(value, packed=False)}
    said = {name: str(one)[:SHORT] for name, one in fields.items() if one not in (None, "", 0, [], (), {})}
    return " ".join(f"{name}={text}" if name else text for name, text in said.items())
