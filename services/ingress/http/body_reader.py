"""Loop: a generating request's body, from its bytes to what it asks for.

A long body takes the processor for a tenth of a second and more (4 MB of token ids), so it is parsed, digested and read
in the executor that also tokenises long texts: everybody's tokens go on meanwhile, and so many bodies are read at
once as it has threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.requests.fields import Body, parse_body
from kvfleet.ingress.runs.repeats import digest_of

INLINE_BYTES = 64 * 1024  # the event loop has these in about 1.5 ms, a list of ids being the slowest there is

Ask = TypeVar("Ask")


@dataclass(frozen=True, slots=True)
class BodyReader:
    """`executor` is shared with other CPU work of the process."""

    executor: Executor
    max_bytes: int
    within_s: float

    async def read(self, exchange: Exchange, route: str, read: Callable[[Body], Ask]) -> tuple[Ask, bytes]:
        """What is asked for, and the digest that its repeats have in common. Raises what `Exchange.read_body` and
        `read` do, and InvalidRequest for what is no JSON object."""
        data = await exchange.read_body(self.max_bytes, self.within_s)
        if len(data) <= INLINE_BYTES:
            return _understood(data, route, read)
        return await asyncio.get_running_loop().run_in_executor(self.executor, _understood, data, route, read)


def _understood(data: bytes, route: str, read: Callable[[Body], Ask]) -> tuple[Ask, bytes]:
    body = parse_body(data)
    return read(body), digest_of(route, body)
