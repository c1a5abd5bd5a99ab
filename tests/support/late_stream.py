"""A stand-in for the stream of a GPU's copies, on the CPU: each copy is as late as a GPU may be."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Late(TorchDispatchMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.copy_.default, aten.index_copy_.default):
            self.stream.queue(lambda: func(*args))
            return args[0]
        if func is aten.index_select.default:
            chosen = torch.zeros(len(args[2]), args[0].shape[1], dtype=args[0].dtype)
            self.stream.queue(lambda: chosen.copy_(func(*args)))
            return chosen
        return func(*args, **(kwargs or {}))


class LateStream:
    """Makes copies in their order, but none before it is waited for."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.pinned: dict[int, int] = {}
        self.refuses = False
        self.fails_at: int | None = None  # one of the copies
        self._queued: list[Callable[[], object]] = []
        self._begun = self._made = 0
        self._lock = threading.RLock()

    def queue(self, copy: Callable[[], object]) -> None:
        with self._lock:
            self._begun += 1
            if self._begun == self.fails_at:
                raise RuntimeError("the device is gone")
            self._queued.append(copy)

    @property
    def under_way(self) -> int:
        return len(self._queued) - self._made

    def stepped(self) -> None:
        self.did.append("stepped")

    def wait_for_step(self) -> None:
        self.did.append("wait")

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self.did.append("copy")
        with Late(self):
            yield

    def mark(self) -> LateMark:
        with self._lock:
            return LateMark(self, len(self._queued))

    def make(self, end: int) -> None:
        with self._lock:
            while self._made < end:
                self._queued[self._made]()
                self._made += 1

    def pin(self, address: int, size: int) -> int:
        if self.refuses:
            return 2
        self.pinned[address] = size
        return 0

    def unpin(self, address: int) -> None:
        del self.pinned[address]


class LateMark:
    def __init__(self, stream: LateStream, end: int) -> None:
        self.synchronize = lambda: stream.make(end)
