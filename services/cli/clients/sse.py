"""Server-sent events as the command line reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from kvfleet.cli.console import printable


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Each `data:` line's JSON object; comments are skipped, `[DONE]` ends."""
    for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Whole lines. `iter_lines` would also break them at U+2028 and its like, which a token's text may hold."""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def error_text(response: httpx.Response) -> str:
    """The message of an error response, whatever its shape; printable."""
    response.read()
    try:
        error = response.json()["error"]
        return printable(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
