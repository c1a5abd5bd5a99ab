"""A message as a NATS callback gets it, a subscription, and what a header says. Knows no nats-py."""

from __future__ import annotations

from typing import Protocol

NO_RESPONDERS = "503"
JSON_HEADER = {"Content-Type": "application/json"}


class Message(Protocol):
    """What a callback receives: a nats-py message, seen only through these names."""

    @property
    def subject(self) -> str: ...
    @property
    def reply(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> dict[str, str] | None: ...


class Subscription(Protocol):
    async def unsubscribe(self) -> None:
        """Stop at once; what is queued is discarded."""

    async def drain(self) -> None:
        """Stop, after what is queued."""


def is_no_responders(message: Message) -> bool:
    """A server's notice that nobody subscribes to the subject that was published to."""
    return not message.data and bool(message.headers) and (message.headers or {}).get("Status") == NO_RESPONDERS


def is_json(message: Message) -> bool:
    """Whether a producer marked its body as JSON."""
    headers = message.headers or {}
    return any(
        k.lower() == "content-type" and v.split(";")[0].strip() == "application/json" for k, v in headers.items()
    )
