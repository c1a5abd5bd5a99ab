"""Loop: a thread that writes lines to a file or to stderr, so that the event loop never waits for a disk.

The file is logging's `WatchedFileHandler`: one that was renamed or removed is opened anew before the next line (log
rotation). Queue, thread and writes are ours, since `QueueHandler`, `QueueListener` and a buffered stream lack three
promises: a line that finds no room, in the queue or on the disk, is dropped for good, counted, and told in the log
itself when there is room; lines are written many at a time; and a disk that hangs holds up no shutdown.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from typing import cast

from kvproto.errors import InvalidRequest

log = logging.getLogger(__name__)

CAPACITY = 8192
BATCH = 512
STDERR = "-"


class AuditFile:
    """`write` is the event loop's; the file is the thread's own. `dropped_line` makes the line that tells of losses."""

    def __init__(self, path: str, dropped_line: Callable[[int], bytes], *, capacity: int = CAPACITY) -> None:
        """Raises InvalidRequest for a file that cannot be opened."""
        self._dropped_line = dropped_line
        self._queue: queue.Queue[bytes | None] = queue.Queue(capacity)
        self._told = 0  # of those dropped
        self._failing = False
        self._closing = False
        self.written_total = 0
        self._full_total = 0  # dropped by writers
        self._failed_total = 0  # dropped by the thread
        try:
            self._file = None if path == STDERR else _OwnersFile(path)
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}", field="audit_log") from None
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Never waits."""
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._full_total += 1

    @property
    def dropped_total(self) -> int:
        return self._full_total + self._failed_total

    def close(self, timeout_s: float = 2.0) -> None:
        self._closing = True
        with contextlib.suppress(queue.Full):  # then the thread sees the flag after the next batch
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            lines = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(lines) < BATCH:
                    lines.append(self._queue.get_nowait())
            said = [line for line in lines if line is not None]
            dropped = self.dropped_total
            news = [self._dropped_line(dropped - self._told)] if dropped > self._told else []
            if not said and not news:
                pass
            elif self._put([*news, *said]):
                self.written_total += len(said)
                self._told = dropped
            else:
                self._failed_total += len(said)
            if self._closing and self._queue.empty():
                break
        if self._file is not None:
            self._file.close()

    def _put(self, lines: list[bytes]) -> bool:
        try:
            fd = 2 if self._file is None else self._file.fileno()
            data = memoryview(b"".join(lines))
            while data:
                data = data[os.write(fd, data) :]
        except OSError as error:
            if not self._failing:
                log.error("the audit log cannot be written: %s", error.strerror)
            self._failing = True
            return False
        self._failing = False
        return True


class _OwnersFile(WatchedFileHandler):
    """Only its owner may read it. Lines go to its descriptor, past the stream's buffer."""

    def fileno(self) -> int:
        """Of the file that the path leads to now. Raises OSError."""
        self.reopenIfNeeded()
        if self.stream is None:  # it could not be opened the last time
            self.stream = self._open()
        return self.stream.fileno()

    def _open(self) -> TextIOWrapper:
        return cast(
            TextIOWrapper, open(self.baseFilename, self.mode, opener=lambda path, flags: os.open(path, flags, 0o600))
        )
