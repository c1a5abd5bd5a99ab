"""What pages ask for every second has a line in the audit log once a minute."""

from __future__ import annotations

import json
from typing import Any

from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.limits.callers import Caller
from kvfleet.ingress.telemetry.audit import REFUSED_PER_MINUTE, Audit
from kvproto.errors import AuthenticationFailed


async def never(*_: Any) -> Any:
    raise AssertionError("nothing is sent or received")


def an_exchange(caller: Caller | None, address: str = "10.0.0.1") -> Exchange:
    scope = {"type": "http", "method": "GET", "headers": [], "client": (address, 1), "query_string": b""}
    exchange = Exchange(scope, never, never, "r")
    exchange.caller = caller
    return exchange


def test_the_first_look_at_the_ledger_in_each_minute_is_written_down_for_each_caller_and_address() -> None:
    lines: list[dict[str, Any]] = []
    now = 600.0
    audit = Audit(lambda line: lines.append(json.loads(line)), lambda: now)
    alice, root = Caller("alice", "acme"), Caller("root", "ops", admin=True)

    def look(caller: Caller, address: str = "10.0.0.1", status: int = 200, route: str = "newest_placements") -> None:
        audit.ended(an_exchange(caller, address), route, status, None)

    for _ in range(3):
        look(alice)
        look(root)
        look(root, "10.0.0.2")
        now += 1
    told = [(one["event"], one["key"], one["admin"], one["source"], one["route"]) for one in lines]
    assert told == [
        ("access", "alice", False, "10.0.0.1", "newest_placements"),
        ("access", "root", True, "10.0.0.1", "newest_placements"),
        ("access", "root", True, "10.0.0.2", "newest_placements"),
    ]
    now = 660.0
    look(alice)
    assert len(lines) == 4
    look(alice, status=403)
    assert len(lines) == 5
    look(alice, route="timeline")
    look(alice, route="timeline")
    assert [one["route"] for one in lines[5:]] == ["timeline"]


def test_a_refusal_does_not_hide_the_reads_that_follow() -> None:
    lines: list[dict[str, Any]] = []
    audit = Audit(lambda line: lines.append(json.loads(line)), lambda: 600.0)
    for status in (400, 200, 429, 200, 503, 200, 400):
        audit.ended(an_exchange(Caller("alice", "acme")), "newest_placements", status, None)
    assert [one["status"] for one in lines] == [400, 200, 503]


def test_strangers_of_many_addresses_have_a_bound_together() -> None:
    lines: list[dict[str, Any]] = []
    now = 600.0
    audit = Audit(lambda line: lines.append(json.loads(line)), lambda: now)
    for number in range(REFUSED_PER_MINUTE + 7):
        error = AuthenticationFailed("no API key", field="authorization")
        audit.ended(an_exchange(None, f"10.0.0.{number}"), "models", 401, error)
    assert [line["event"] for line in lines] == ["auth.refused"] * REFUSED_PER_MINUTE
    now += 60
    audit.reloaded("API keys", None)
    assert [(line["event"], line.get("count")) for line in lines[-2:]] == [("auth.left_out", 7), ("reload", None)]
