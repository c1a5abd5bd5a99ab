"""`POST /generate` as a client reads it: one stream to its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

from tests.support import sse
from tests.support.waiting import LIMIT_S


class Streamed(NamedTuple):
    """Token ids, when each came (`time.monotonic`), and the terminal event."""

    ids: list[int]
    times: list[float]
    end: dict[str, Any]


def native_stream(
    base: str,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
    on_token: Callable[[str, int], None] | None = None,
    timeout_s: float = LIMIT_S,
) -> Streamed:
    """`on_token(worker, tokens so far)`, the worker being the one it started at."""
    ids: list[int] = []
    times: list[float] = []
    worker = ""
    with httpx.stream("POST", f"{base}/generate", json=body, headers=headers or {}, timeout=timeout_s) as response:
        assert response.status_code == 200, response.read()
        for line in sse.lines(response):
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "start":
                worker = event["worker_id"]
            elif event["type"] == "token":
                ids.append(event["token_id"])
                times.append(time.monotonic())
                if on_token is not None:
                    on_token(worker, len(ids))
            else:
                return Streamed(ids, times, event)
    raise AssertionError("no terminal event")
