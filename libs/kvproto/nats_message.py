"""Messages and subscriptions of NATS as protocols, without nats-py."""

from __future__ import annotations

from typing import Protocol

NO_RESPONDERS = "503"
JSON_HEADER = {"Content-Type": "application/json"}


class Message(Protocol):
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
        """Discards queued messages."""

    async def drain(self) -> None:
        """Delivers queued messages first."""


def is_no_responders(message: Message) -> bool:
    return not message.data and bool(message.headers) and (message.headers or {}).get("Status") == NO_RESPONDERS


def is_json(message: Message) -> bool:
    headers = message.headers or {}
    return any(
        k.lower() == "content-type" and v.split(";")[0].strip() == "application/json" for k, v in headers.items()
    )
