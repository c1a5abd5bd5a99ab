"""The worker beside vLLM, as vLLM's scheduler and its tier see it: a socket and a file. Both interpreters run it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvfleet_vllm.wire import VERSION, BlocksRead, Decoder, Message, encode

TOKENS = 16


class TierSidecar:
    """`slots` of `size` bytes, with random content."""

    def __init__(self, folder: Path, slots: int, size: int) -> None:
        self.path, self.file, self.slots, self.size = str(folder / "w"), folder / "s", slots, size
        self.file.write_bytes(os.urandom(slots * size))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(4)
        self._listener.setblocking(False)
        self._link: socket.socket | None = None
        self._decoder = Decoder()

    def heard(self) -> list[Message]:
        """All since the last time; of a new connection if there is one. Copies take no time."""
        try:
            link, _ = self._listener.accept()
            self.hang_up()
            self._link, self._decoder = link, Decoder()
            link.setblocking(False)
        except BlockingIOError:
            pass
        found: list[Message] = []
        try:
            while self._link is not None and (data := self._link.recv(1 << 16)):
                found += self._decoder.feed(data)
        except BlockingIOError:
            pass
        return [replace(one, seconds=0.0) if isinstance(one, BlocksRead) else one for one in found]

    def say(self, *messages: Message) -> None:
        assert self._link is not None
        self._link.sendall(encode(messages))

    def hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

    def close(self) -> None:
        self.hang_up()
        self._listener.close()

    def slot(self, number: int) -> bytes:
        return self.file.read_bytes()[number * self.size :][: self.size]

    def params(self, slots: Sequence[int] = (), at: int = 0, save_from: int | None = None) -> dict[str, Any]:
        """Of a request, whose blocks from `at` on lie in `slots`."""
        asked: dict[str, Any] = {"version": VERSION, "socket": self.path}
        asked["store"] = {"path": str(self.file), "slots": self.slots, "block_tokens": TOKENS}
        asked["restore"] = {"at": at, "slots": list(slots)}
        asked["save_from"] = save_from
        return {"kvfleet": asked}

    def request(self, name: str, tokens: int, **wanted: Any) -> Any:
        """As vLLM's scheduler has it."""
        ident = f"generate-tokens-{name}-00000000"
        return SimpleNamespace(request_id=ident, num_tokens=tokens, kv_transfer_params=self.params(**wanted))


def step_of(*requests: Any, cached: int = 0) -> Any:
    """vLLM's SchedulerOutput where these begin, with so many tokens that are there; empty for none."""
    new = [SimpleNamespace(req_id=one.request_id, num_computed_tokens=cached) for one in requests]
    counts = {one.request_id: one.num_tokens - cached for one in requests}
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[]),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        preempted_req_ids=None,
    )
