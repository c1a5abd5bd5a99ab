"""Server-sent events as the command line reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
from httpx_sse import EventSource

from kvfleet.cli.console import printable


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Each event's JSON object; comments are skipped, `[DONE]` ends."""
    for event in EventSource(response).iter_sse():
        if event.data == "[DONE]":
            return
        yield event.json()


def error_text(response: httpx.Response) -> str:
    """The message of an error response, whatever its shape; printable."""
    response.read()
    try:
        error = response.json()["error"]
        return printable(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
