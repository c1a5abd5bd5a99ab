"""A bare HTTP/1.1 streaming client: the load must cost less than what it measures."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit


class Connection:
    """One kept-alive connection. `stream` counts `data:` lines and notes when the first matching one came."""

    def __init__(self, base: str) -> None:
        parts = urlsplit(base)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stream(self, path: str, body: dict[str, Any], mark: bytes) -> tuple[float, int]:
        """POST and read to the end. Returns seconds until `mark` first appeared, and how often it did."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=2**20)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        began = time.perf_counter()
        self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n", 1)[0]:
            raise RuntimeError(status.decode() + (await self._reader.read(2000)).decode(errors="replace"))
        first, count, carry = 0.0, 0, b""
        while True:  # the body is chunked; a last chunk of length 0 ends it
            piece = await self._reader.read(2**18)
            if not piece:
                raise RuntimeError("the server closed the connection")
            seen = carry + piece
            found = seen.count(mark)
            if found and not first:
                first = time.perf_counter() - began
            count += found
            cut = seen.rfind(mark)
            carry = seen[max(cut + len(mark) if cut >= 0 else 0, len(seen) - len(mark) - 8) :]
            if piece.endswith(b"0\r\n\r\n"):
                return first, count

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
