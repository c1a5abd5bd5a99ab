"""Lines of server-sent events: they end with a line feed, whatever a token's text holds.

`httpx.Response.iter_lines` also breaks them at U+2028, U+2029 and U+0085.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx


def lines(response: httpx.Response) -> Iterator[str]:
    """The whole lines of an answer, as they come."""
    rest = b""
    for data in response.iter_bytes():
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in whole)


async def alines(response: httpx.Response) -> AsyncIterator[str]:
    """The same of an asynchronous one."""
    rest = b""
    async for data in response.aiter_bytes():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode()
