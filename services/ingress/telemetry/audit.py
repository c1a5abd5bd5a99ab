"""The audit log: who did what, one JSON object a line. Names, ids, counts and codes; never a prompt, a token or a key.

    request.start   a generating request was let in and read
    request.end     its end: status, tokens
    access          a session or a placement was read, a session deleted; and each act that a key did not allow. Of
                    the newest placements, which pages ask for every second, the first time in each minute, and the
                    first that was refused, and that failed: no refusal hides a read
    auth.refused    an unknown caller: why, and from where; the first 10 of an address in each minute, and 100 of all
    auth.left_out   so many refusals of the minutes before have no line
    reload          files were taken up, or not
    dropped         so many lines were lost before this one

What a caller wrote is named only where the fleet knows it: a model that is served, a session by its own key.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.telemetry.audit_file import AuditFile
from kvfleet.ingress.telemetry.metrics import GENERATING
from kvproto.errors import AuthenticationFailed, KvfleetError
from kvproto.ids import session_key

POLLED = "newest_placements"
REFUSED_PER_ADDRESS = 10
REFUSED_PER_MINUTE = 100
ACCESS = ("session_get", "session_kv", "session_delete", "placements")


@dataclass(eq=False, slots=True)
class Audit:
    """Owned by the event loop; what it makes goes to `write`. None: there is no audit log."""

    write: Callable[[bytes], None] | None
    unix_s: Callable[[], float]
    minute: int = 0  # what follows is of this one
    polled: set[tuple[str, str, str | None, int]] = field(default_factory=set)  # who, from where, what status class
    refused: Counter[str | None] = field(default_factory=Counter)  # that have a line, by address
    left_out: int = 0

    @property
    def is_on(self) -> bool:
        return self.write is not None

    def request_started(self, exchange: Exchange, route: str, model: str | None) -> None:
        """`model` as the caller said it, if there is one of that name."""
        self._say("request.start", **_whose(exchange, route), model=model)

    def ended(self, exchange: Exchange, route: str, status: int, error: KvfleetError | None) -> None:
        if not self.is_on:
            return
        if isinstance(error, AuthenticationFailed) or exchange.caller is None:
            if error is not None and status in (401, 403, 503) and self._may_tell_refusal(exchange.source):
                # of the door: others have a caller
                self._say("auth.refused", **_whose(exchange, route), status=status, reason=error.message)
            return
        seconds = round(exchange.seconds, 6)
        code = error.code if error is not None else None
        if route in GENERATING:
            self._say(
                "request.end", **_whose(exchange, route), status=status, error=code, seconds=seconds, **_cost(exchange)
            )
        elif route in ACCESS or status == 403 or (route == POLLED and self._is_first_in_minute(exchange, status)):
            target = exchange.path_params
            known: dict[str, Any] = {}
            if "seq_id" in target:
                known["session"] = session_key(exchange.caller.tenant, target["seq_id"])
            self._say(
                "access",
                **_whose(exchange, route),
                method=exchange.method,
                **known,
                status=status,
                error=code,
                seconds=seconds,
            )

    def reloaded(self, what: str, why_not: str | None) -> None:
        self._say("reload", what=what, ok=why_not is None, reason=why_not)

    def _may_tell_refusal(self, source: str | None) -> bool:
        """Unknown callers must not fill the log, nor its queue, where the lines of others would be lost."""
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

    def _is_first_in_minute(self, exchange: Exchange, status: int) -> bool:
        self._begin_minute()
        assert exchange.caller is not None
        who = exchange.caller.tenant, exchange.caller.name, exchange.source, status // 100
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
    return {**who, "source": exchange.source, "request": exchange.request_id, "route": route}


def _cost(exchange: Exchange) -> dict[str, Any]:
    """What the run has cost so far; one that is read by several requests is told by each, as a `repeat` by all but the
    one that began it."""
    usage = exchange.usage
    counts = {name: getattr(usage, name, 0) for name in ("prompt_tokens", "output_tokens", "cached_tokens")}
    return {"model": getattr(usage, "model", None), **counts, "repeat": usage is not None and exchange.repeats}


def audit_line(unix_s: float, event: str, **fields: Any) -> bytes:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    value = {"time": f"{moment}.{int(unix_s * 1000) % 1000:03d}Z", "event": event, **fields}
    return orjson.dumps(value, default=str) + b"\n"


def open_audit_file(path: str) -> AuditFile:
    """Raises InvalidRequest."""
    return AuditFile(path, lambda count: audit_line(time.time(), "dropped", count=count))
