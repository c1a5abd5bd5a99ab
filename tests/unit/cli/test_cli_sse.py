"""Streams as the command line reads them: a line ends with a line feed, whatever a token's text holds."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from kvfleet.cli.clients.answers import events

TEXTS = ["a", "\u2028", "\u2029", "\x85", "\x0b\x0c\x1c\x1d\x1e", "\r", "é🙂", "\n\ndata: x"]


class Pieces(httpx.SyncByteStream):
    def __init__(self, data: bytes, size: int) -> None:
        self._pieces = [data[at : at + size] for at in range(0, len(data), size)]

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_a_token_holds_ends_no_line(size: int, end: str) -> None:
    sent = [f": waiting{end}"]
    sent += [f"id: 1{end}data: {json.dumps({'token': text}, ensure_ascii=False)}{end}{end}" for text in TEXTS]
    data = "".join([*sent, f"data: [DONE]{end}{end}"]).encode()
    response = httpx.Response(200, stream=Pieces(data, size), headers={"content-type": "text/event-stream"})
    assert [event["token"] for event in events(response)] == TEXTS
