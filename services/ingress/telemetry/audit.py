"""The audit log, one JSON object a line: names, ids, counts and codes; never a prompt, a token or a key. A caller's
words are in it only where the fleet knows them: a served model, a session by its own key; and a request's own id.

    request.start, request.end   of a generating request that was let in and read
    access          a session or a placement was read, a session deleted, a worker told to drain; and each act that a
                    key did not allow. Of the newest placements and of the timeline, which pages poll every second, the
                    first of each status class in a minute
    auth.refused    an unknown caller; the first 10 of an address in each minute, and 100 of all
    auth.left_out   so many refusals of the minutes before have no line
    reload          files were taken up, or not
    dropped         so many lines were lost before this one
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from typing import Any, cast

import orjson

from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.telemetry.metrics import GENERATING
from kvproto.errors import AuthenticationFailed, InvalidRequest, KvfleetError
from kvproto.ids import session_key

log = logging.getLogger(__name__)

CAPACITY = 8192  # lines
BATCH = 512
STDERR = "-"
POLLED = ("newest_placements", "timeline")
REFUSED_PER_ADDRESS = 10
REFUSED_PER_MINUTE = 100
DRAIN = "worker_drain"
ACCESS = ("session_get", "session_kv", "session_delete", "placements", DRAIN)


@dataclass(eq=False, slots=True)
class Audit:
    """Owned by the event loop. `write` None: there is no audit log."""

    write: Callable[[bytes], None] | None
    unix_s: Callable[[], float]
    minute: int = 0  # what follows is of this one
    polled: set[tuple[str, str, str | None, str, int]] = field(default_factory=set)  # who, whence, what, status class
    refused: Counter[str | None] = field(default_factory=Counter)  # that have a line, by address
    left_out: int = 0

    @property
    def is_on(self) -> bool:
        return self.write is not None

    def request_started(self, exchange: Exchange, route: str, model: str | None) -> None:
        """`model`: its name, if there is one of that name."""
        self._say("request.start", **_whose(exchange, route), model=model)

    def ended(self, exchange: Exchange, route: str, status: int, error: KvfleetError | None) -> None:
        if not self.is_on:
            return
        if isinstance(error, AuthenticationFailed) or exchange.caller is None:
            if error is not None and status in (401, 403, 503) and self._may_tell_refusal(exchange.source):
                self._say("auth.refused", **_whose(exchange, route), status=status, reason=error.message)
            return
        seconds = round(exchange.seconds, 6)
        code = error.code if error is not None else None
        if route in GENERATING:
            self._say(
                "request.end", **_whose(exchange, route), status=status, error=code, seconds=seconds, **_cost(exchange)
            )
        elif (
            route in ACCESS or status == 403 or (route in POLLED and self._is_first_in_minute(exchange, route, status))
        ):
            target = exchange.path_params
            who = {**_whose(exchange, route), "method": exchange.method}
            if "seq_id" in target:
                who["session"] = session_key(exchange.caller.tenant, target["seq_id"])
            if route == DRAIN and status in (200, 503):  # else the fleet may not know it
                who["worker"] = target["worker_id"]
            self._say("access", **who, status=status, error=code, seconds=seconds)

    def reloaded(self, what: str, why_not: str | None) -> None:
        self._say("reload", what=what, ok=why_not is None, reason=why_not)

    def _may_tell_refusal(self, source: str | None) -> bool:
        """Unknown callers must fill neither the log nor its queue, where other lines would be lost."""
        self._begin_minute()
        if self.refused.total() < REFUSED_PER_MINUTE and self.refused[source] < REFUSED_PER_ADDRESS:
            self.refused[source] += 1
            return True
        self.left_out += 1
        return False

    def _begin_minute(self) -> None:
        minute = int(self.unix_s() // 60)
        if minute == self.minute:
            return
        self.minute = minute
        self.polled.clear()
        self.refused.clear()
        if self.left_out:
            left_out, self.left_out = self.left_out, 0
            self._say("auth.left_out", count=left_out)

    def _is_first_in_minute(self, exchange: Exchange, route: str, status: int) -> bool:
        self._begin_minute()
        assert exchange.caller is not None
        who = exchange.caller.tenant, exchange.caller.name, exchange.source, route, status // 100
        before = len(self.polled)
        self.polled.add(who)
        return len(self.polled) > before

    def _say(self, event: str, **fields: Any) -> None:
        if self.write is not None:
            self._begin_minute()
            self.write(audit_line(self.unix_s(), event, **fields))


NO_AUDIT = Audit(None, lambda: 0.0)


def _whose(exchange: Exchange, route: str) -> dict[str, Any]:
    caller = exchange.caller
    who = {"tenant": caller.tenant, "key": caller.name, "admin": caller.admin} if caller is not None else {}
    named = {"callers_id": exchange.callers_id} if exchange.callers_id is not None else {}
    return {**who, "source": exchange.source, "request": exchange.request_id, **named, "route": route}


def _cost(exchange: Exchange) -> dict[str, Any]:
    """Each reader of a run writes its cost, as a `repeat` unless it began the run."""
    usage = exchange.usage
    counts = {name: getattr(usage, name, 0) for name in ("prompt_tokens", "output_tokens", "cached_tokens")}
    return {"model": getattr(usage, "model", None), **counts, "repeat": usage is not None and exchange.repeats}


def audit_line(unix_s: float, event: str, **fields: Any) -> bytes:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    value = {"time": f"{moment}.{int(unix_s * 1000) % 1000:03d}Z", "event": event, **fields}
    return orjson.dumps(value, default=str) + b"\n"


class AuditFile:
    """A thread that writes lines to a file or to stderr, so that the event loop never waits for a disk.

    The file is logging's `WatchedFileHandler`, for log rotation. Queue, thread and writes are ours: `QueueHandler` and
    `QueueListener` lack three promises. A line without room, in the queue or on the disk, is dropped, counted, and
    reported in the log later; lines are written many at a time; and a disk that hangs delays no shutdown.
    """

    def __init__(self, path: str, *, capacity: int = CAPACITY) -> None:
        """Raises InvalidRequest for a file that cannot be opened."""
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
            lost = dropped - self._told
            news = [audit_line(time.time(), "dropped", count=lost)] if lost else []
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
