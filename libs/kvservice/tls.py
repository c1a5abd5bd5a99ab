"""Wiring: TLS contexts that follow their files, so that renewed certificates need no restart.

The next handshake uses the files' present content; open connections stay. Unusable files (half copied, of different
keys) are logged and change nothing.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvproto.errors import Unavailable

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


class FollowingContext(ssl.SSLContext):
    """Stands for the latest context that `build` made of `files`; it raises OSError for unusable files. Thread-safe."""

    _build: Callable[[], ssl.SSLContext]
    _files: tuple[Path, ...]
    _now: ssl.SSLContext
    _seen: Stamp | None
    _lock: threading.Lock

    @classmethod
    def of(cls, what: str, build: Callable[[], ssl.SSLContext], files: Iterable[str | Path | None]) -> FollowingContext:
        """Raises Unavailable, with `what` as the files' name."""
        paths = tuple(Path(file) for file in files if file is not None)
        seen = _stamp(paths)  # before the read: later changes are read again
        try:
            now = build()
        except OSError as error:
            raise Unavailable(f"cannot read {what} ({', '.join(map(str, paths))}): {error}") from None
        self = cls(now.protocol)
        self._build, self._files, self._now, self._seen, self._lock = build, paths, now, seen, threading.Lock()
        return self

    def current(self) -> ssl.SSLContext:
        with self._lock:
            seen = _stamp(self._files)
            if seen is not None and seen != self._seen:
                self._seen = seen
                try:
                    self._now = self._build()
                    log.info("TLS files were read again: %s", ", ".join(map(str, self._files)))
                except OSError as error:
                    log.warning("TLS files changed and cannot be used, the former ones stay: %s", error)
            return self._now

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:  # for threads: the data plane
        return self.current().wrap_socket(*args, **options)

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:  # for event loops: NATS
        return self.current().wrap_bio(*args, **options)


def _stamp(files: tuple[Path, ...]) -> Stamp | None:
    """None while a file is missing, as between two versions."""
    try:
        return tuple((at.st_ino, at.st_mtime_ns, at.st_size) for at in map(Path.stat, files))
    except OSError:
        return None
