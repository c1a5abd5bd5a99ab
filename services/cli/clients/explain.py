"""`kvfleet explain`: why a request went to its worker. It asks the ingress, which keeps tenants apart, and not NATS."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from kvfleet.cli.clients.answers import asking, client, get
from kvfleet.cli.clients.generate import DEFAULT_URL, Key, Url
from kvfleet.cli.console import Terminal, figures, out, printable
from kvproto.messages import Tier

UNKNOWN = "-"
# A line that the terminal wraps is better than names and figures that are cut to fit.
tables = Terminal(highlight=False, markup=False, width=1000)


def explain(
    request: Annotated[str, typer.Argument(metavar="ID", help="as an answer shows it: request_id, id or x-request-id")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON instead of tables")] = False,
) -> None:
    """Why a request was placed where it was: who was considered, at what cost, and what really happened."""
    with asking(url), client(api_key) as http:
        found = get(http, f"{url}/v1/placements/{quote(request, safe='')}")
        if as_json:
            typer.echo(json.dumps(found))
            return
        for attempt in found["attempts"]:
            _show(found["request_id"], attempt)


def _show(request: str, attempt: dict[str, Any]) -> None:
    when = datetime.fromtimestamp(attempt["decided_unix_ms"] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    number = f", attempt {attempt['attempt']}" if attempt["attempt"] else ""
    _say(
        f"{request}{number}: {attempt['worker_id']} by {attempt['policy']}, {attempt['prompt_tokens']:,} prompt tokens "
        f"of {attempt['tenant']} for {attempt['model']}, {when} UTC at {attempt['placement_id']}"
    )
    _say(attempt["why"])
    if attempt.get("source_worker_id"):
        source = attempt["source_worker_id"]
        _say(f"may pull from {source}, which has {attempt['source_tokens']:,} tokens of the prompt")
    out.print()
    tables.print(_candidates(attempt))
    left_out = attempt["candidates_total"] - len(attempt["candidates"])
    if left_out > 0:
        out.print(f"and {left_out:,} further candidates")
    out.print()
    tables.print(_outcome(attempt))
    out.print()


def _say(line: str) -> None:
    out.print(printable(line))


def _candidates(attempt: dict[str, Any]) -> Table:
    """Cheapest first, the chosen one marked; costs in ms, which some policies do not have."""
    candidates = attempt["candidates"]
    terms = _names(one["terms_ms"] for one in candidates)
    tiers = _tiers(one["matched_tokens"] for one in candidates)
    costly = [*terms, "cost ms"] if terms else []
    table = figures(out, "  worker", *costly, *(f"{tier} tokens" for tier in tiers))
    for one in candidates:
        costs = [*(one["terms_ms"].get(term) for term in terms), one["cost_ms"]] if terms else []
        held = [one["matched_tokens"].get(tier, 0) for tier in tiers]
        table.add_row(
            f"{'*' if one['chosen'] else ' '} {one['worker_id']}",
            *(_ms(cost) for cost in costs),
            *(f"{tokens:,}" for tokens in held),
            style="bold" if one["chosen"] else None,
        )
    return table


def _outcome(attempt: dict[str, Any]) -> Table:
    expected, actual = attempt["expected_hit_tokens"], attempt["actual"]
    found = actual["cached_tokens"]
    table = figures(out, "", "expected", "actual")
    for tier in _tiers([expected, found or {}]) or [Tier.DEVICE]:
        table.add_row(
            f"cached tokens, {tier}",
            f"{expected.get(tier, 0):,}",
            UNKNOWN if found is None else f"{found.get(tier, 0):,}",
        )
    table.add_row("queue ms", "", _ms(actual["queue_ms"]))
    table.add_row("TTFT ms", _ms(attempt["expected_ttft_ms"]), _ms(actual["ttft_ms"]))
    table.add_row("output tokens", "", f"{actual['output_tokens']:,}" if actual["ended"] else UNKNOWN)
    table.add_row("ended", "", _ending(actual))
    return table


def _ending(actual: dict[str, Any]) -> str:
    if actual["ended"]:
        return str(actual["error_code"] or "yes")
    return "not yet" if actual["accepted"] else "not accepted"


def _names(tables: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _tiers(tables: Iterable[dict[str, Any]]) -> list[str]:
    """Fastest first; unknown ones, of a newer fleet, last."""
    known = [tier.value for tier in Tier]
    return sorted(_names(tables), key=lambda tier: known.index(tier) if tier in known else len(known))


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else f"{round(value, 1) + 0.0:,.1f}"  # never -0.0
