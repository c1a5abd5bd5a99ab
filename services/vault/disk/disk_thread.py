"""Loop: the one thread that touches a vault's disk. It owns the `DiskStore`; connections ask, and wait for its answer.

    ask (read, forget) ──▶ queue ──▶ done at once, in turn
    wake: little room  ──▶ one block after another is written while the queue is empty

Blocks that cannot be written stay in memory until their room is needed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvfleet.vault.disk.disk import DiskStore
from kvfleet.vault.store.block_table import BlockEntry
from kvfleet.vault.store.store import VaultStore
from kvproto.dataplane.block import BlockHeader

log = logging.getLogger(__name__)

PAUSE_S = 1.0  # after a failure to write
KEPT_FRACTION = 0.75  # of the disk, to be filled before the end: the first blocks must not give way again


@dataclass(eq=False)
class DiskThread:
    """Sole user of an open disk. `start` with its store; `close` ends it. All else may be called from any thread."""

    disk: DiskStore
    failures_total: int = 0  # writes and erasures that the disk refused
    _store: VaultStore = field(init=False)
    _asked: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _closing: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False
    _last_words_s: float = 0.0
    _woken: bool = False
    _spilling: bool = False
    _paused_until: float = 0.0

    def __post_init__(self) -> None:
        self.used_bytes = self.disk.bytes_used  # as of the last thing it did
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)

    def start(self, store: VaultStore) -> None:
        self._store = store
        self._thread.start()

    def close(self, last_words_s: float) -> None:
        """Answer what waits, then write, for `last_words_s` at most, what a restart would lose. Waits for it."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._last_words_s = last_words_s
                self._asked.put(None)
        self._thread.join()

    def read(self, header: BlockHeader, target: memoryview) -> bool:
        return self._ask(lambda: self._read(header, target))

    @property
    def owes(self) -> bool:
        return self.disk.owes

    def forget(self, hashes: Sequence[bytes]) -> bool:
        return self._ask(lambda: self._forget(hashes))

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._asked.put(self._begin_spilling)

    def _ask(self, work: Callable[[], bool]) -> bool:
        """Waits without a limit, as the disk owns the target meanwhile. False if the thread has ended."""
        answer: Future[bool] = Future()

        def do() -> None:
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                answer.set_exception(error)

        with self._closing:
            if self._closed:
                return False
            self._asked.put(do)
        return answer.result()

    def _run(self) -> None:
        while True:
            again_s = PAUSE_S if self.disk.owes else None
            try:
                asked = self._asked.get_nowait() if self._spilling else self._asked.get(timeout=again_s)
            except queue.Empty:
                asked = self._spill_one if self._spilling else self._erase_again
            if asked is None:
                break
            self._guarded(asked)
        self._guarded(self._write_last)
        self.disk.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a loop's top: connections wait for this thread
            log.exception("the disk's thread goes on after a fault")
            self._pause()

    def _pause(self) -> None:
        self._spilling = False
        self._paused_until = time.monotonic() + PAUSE_S

    def _begin_spilling(self) -> None:
        self._woken = False
        self._spilling = time.monotonic() >= self._paused_until

    def _spill_one(self) -> None:
        entry = self._store.next_spill()
        if entry is None:
            self._spilling = False
        elif not self._write(entry):
            self._pause()

    def _write(self, entry: BlockEntry) -> bool:
        """Write a pinned block, and unpin it. Whether the disk took it."""
        header, written = entry.header, False
        try:
            if self.disk.has(header.hash):  # a lossy version, or one that is about to be forgotten
                self.disk.forget([header.hash])
            self.disk.append(header, entry.view)
            written = True
        except OSError as error:
            self._failed("write", error)
        finally:
            wanted = self._store.spilled(entry, written)
        if not wanted:
            self._forget([header.hash])
        self._tell_lost()
        return written

    def _read(self, header: BlockHeader, target: memoryview) -> bool:
        try:
            found = self.disk.read(header.hash, target)
        except ValueError:  # another version, which is larger
            found = None
        self._tell_lost()
        return found == header

    def _forget(self, hashes: Sequence[bytes]) -> bool:
        try:
            self.disk.forget(hashes)
        except OSError as error:
            self._failed("erase", error)
        self._tell_lost()
        return not self.disk.owes

    def _erase_again(self) -> None:
        self._forget(())

    def _tell_lost(self) -> None:
        self.used_bytes = self.disk.bytes_used
        lost = self.disk.take_lost()
        if lost:
            self._store.lost_on_disk(lost)

    def _write_last(self) -> None:
        end, room = time.monotonic() + self._last_words_s, self.disk.max_bytes * KEPT_FRACTION
        for entry in self._store.unwritten() if self._last_words_s > 0 else ():
            room -= entry.header.length
            if time.monotonic() > end or room < 0:
                break
            if self._store.pin_unwritten(entry) and not self._write(entry):
                break

    def _failed(self, what: str, error: OSError) -> None:
        self.failures_total += 1
        if self.failures_total & (self.failures_total - 1) == 0:  # the first, second, fourth, eighth...
            log.warning("the disk failed to %s: %s (%d failures so far)", what, error, self.failures_total)
