"""The pages of `kvfleet top`: tables for a terminal of any size, or plain text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvfleet.cli.console import printable
from kvservice.byte_size import readable

NONE = "-"
TABLE_LINES = 2  # of a table without its rows, and the line before it
MIN_LEDGER_ROWS = 3
SMALL, NARROW, MEDIUM = 60, 80, 110
STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "dead": "red"}


@dataclass(frozen=True)
class TopSnapshot:
    """Its fields are those of `--json`. None: the API key may not see it."""

    url: str
    unix_ms: int
    hit_rate_last_minute: float | None
    tokens_per_s: float | None
    stats: Mapping[str, Any] | None
    workers: Mapping[str, Mapping[str, Any]] | None  # as the ingress says it, with the two rates of each
    health: Mapping[str, Any] | None
    placements: list[Mapping[str, Any]] | None
    notes: tuple[str, ...] = ()


def screen(snapshot: TopSnapshot, trouble: str, width: int, height: int) -> RenderableType:
    """At most `height` lines: the ledger takes what workers and tiers leave. `trouble`: why no snapshot is newer."""
    parts: list[RenderableType] = [*_head(snapshot, width), *(_line(note, "yellow") for note in snapshot.notes)]
    left = height - len(parts) - 1
    workers = snapshot.workers
    tiers = _tiers(snapshot, width, plain=False)
    tier_lines = TABLE_LINES + tiers.row_count if tiers is not None else 0
    if workers is not None:
        room = left - TABLE_LINES - tier_lines - TABLE_LINES - MIN_LEDGER_ROWS
        shown = len(workers) if len(workers) <= max(room, 2) else max(room - 1, 1)
        parts += [Text(), _workers(snapshot, width, shown, plain=False)]
        left -= TABLE_LINES + shown
        if shown < len(workers):
            parts.append(_line(f"and {len(workers) - shown} further workers", "dim"))
            left -= 1
    if tiers is not None and left >= tier_lines:
        parts += [Text(), tiers]
        left -= tier_lines
    if snapshot.placements and left > TABLE_LINES:
        parts += [Text(), _ledger(snapshot.placements[: left - TABLE_LINES], width, plain=False)]
    return Group(*parts, _line(trouble, "bold red") if trouble else _line("q ends", "dim"))


def page(snapshot: TopSnapshot, ledger_lines: int) -> RenderableType:
    """Everything, without colours and frames."""
    parts: list[RenderableType] = [*_head(snapshot, 1000), *(_name(note) for note in snapshot.notes)]
    if snapshot.workers is not None:
        parts += [Text(), _workers(snapshot, 1000, len(snapshot.workers), plain=True)]
    if (tiers := _tiers(snapshot, 1000, plain=True)) is not None:
        parts += [Text(), tiers]
    if snapshot.placements:
        parts += [Text(), _ledger(snapshot.placements[:ledger_lines], 1000, plain=True)]
    return Group(*parts)


def _head(snapshot: TopSnapshot, width: int) -> list[Text]:
    when = datetime.fromtimestamp(snapshot.unix_ms / 1000).strftime("%H:%M:%S")
    lines = [f"kvfleet {snapshot.url}  {when}"]
    stats, health = snapshot.stats, snapshot.health
    if stats is not None:
        load = stats["load"]
        members = f"workers ready {stats['ready']} of {stats['workers']}, placements {stats['placements']}, "
        members += f"vaults {stats['vaults']}, models {', '.join(stats['models']) or 'none'}"
        work = f"{load['running']:,} running, {load['waiting']:,} queued, {rate(snapshot.tokens_per_s)} tokens/s, "
        work += f"hit rate {share(snapshot.hit_rate_last_minute)} (last minute), {share(stats['hit_rate'])} (all)"
        lines += [members, work]
    elif health is not None:
        lines.append(
            f"workers ready {health['workers_ready']}, placements {health['placements']}, vaults {health['vaults']}, "
            f"models {', '.join(health.get('models', [])) or 'none'}"
        )
    return [_line(line, "" if number else "bold") for number, line in enumerate(lines)]


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _name(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


Row = Mapping[str, str | Text]


def _table(widths: Mapping[str, int], left: Iterable[str], rows: Iterable[Row], width: int, *, plain: bool) -> Table:
    """`widths`: the least width of the terminal at which a column is shown."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="" if plain else "dim")
    names = [name for name, at_least in widths.items() if width >= at_least]
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(row.get(name, NONE) for name in names))
    return table


def _workers(snapshot: TopSnapshot, width: int, shown: int, *, plain: bool) -> Table:
    widths = {
        "worker": 0, "state": 0, "model": MEDIUM, "engine": MEDIUM, "host": MEDIUM, "running": 0, "queued": SMALL,
        "blocks used": NARROW, "cached": NARROW, "hit rate": 0, "tokens/s": 0, "oldest wait": NARROW,
    }  # fmt: skip
    assert snapshot.workers is not None
    rows: list[Row] = []
    for worker, one in list(snapshot.workers.items())[:shown]:
        load, state = one["load"], one["state"]
        row: dict[str, str | Text] = {
            "worker": _name(worker),
            "state": _name(_doing(one), "" if plain else STATE_STYLES.get(state, "")),
            "model": _name(one["model"]),
            "engine": _name(_kind(one)),
            "host": _name(one["host"]),
        }
        if state != "dead":
            row |= {
                "running": f"{load['running']:,}",
                "queued": f"{load['waiting']:,}",
                "blocks used": f"{load['blocks_used']:,} of {load['blocks_total']:,}",
                "cached": f"{load['blocks_cached']:,}",
                "hit rate": share(one["hit_rate_last_minute"]),
                "tokens/s": rate(one["tokens_per_s"]),
                "oldest wait": milliseconds(load["oldest_wait_s"] * 1000 or None),
            }
        rows.append(row)
    return _table(widths, ("worker", "state", "model", "engine", "host"), rows, width, plain=plain)


def _kind(worker: Mapping[str, Any]) -> str:
    """Its engine, and the half of requests that it is for."""
    role = worker.get("role", "both")  # an older ingress says none
    return str(worker["engine"]) if role == "both" else f"{worker['engine']}, {role}"


def _doing(worker: Mapping[str, Any]) -> str:
    """Its state, or what it does while it starts."""
    loading = worker.get("loading")
    if loading is None or worker["state"] != "starting":
        return str(worker["state"])
    total = loading["total_bytes"]
    return str(loading["doing"]) + (f" {loading['weight_bytes'] / total:.0%}" if total else "")


def _tiers(snapshot: TopSnapshot, width: int, *, plain: bool) -> Table | None:
    if snapshot.stats is None:
        return None
    widths = {
        "tier": 0, "blocks": 0, "held": SMALL, "hit tokens": 0, "restored": MEDIUM, "offloaded": MEDIUM,
        "evicted": NARROW, "failures": NARROW,
    }  # fmt: skip
    load = snapshot.stats["load"]
    below: Mapping[str, Mapping[str, Any]] = load["tiers"]
    used = load["blocks_used"] + load["blocks_cached"]
    hits = load["hit_tokens_total"] - sum(tier["hit_tokens_total"] for tier in below.values())
    rows: list[Row] = [
        {
            "tier": "device",
            "blocks": f"{used:,} of {load['blocks_total']:,}",
            "held": share(used / load["blocks_total"] if load["blocks_total"] else None),
            "hit tokens": f"{max(hits, 0):,}",
            "evicted": f"{load['evictions_total']:,}",
        }
    ]
    for name, tier in below.items():
        failures = ", ".join(f"{why} {number:,}" for why, number in tier["failures_total"].items() if number)
        holds = bool(tier["bytes_total"])
        rows.append(
            {
                "tier": _name(name),
                "blocks": f"{tier['blocks']:,}" if holds else NONE,
                "held": f"{readable(tier['bytes_used'])} of {readable(tier['bytes_total'])}" if holds else NONE,
                "hit tokens": f"{tier['hit_tokens_total']:,}",
                "restored": readable(tier["restored_bytes_total"]),
                "offloaded": f"{tier['offloaded_blocks_total']:,}",
                "evicted": f"{tier['evictions_total']:,}",
                "failures": _name(failures or "none"),
            }
        )
    return _table(widths, ("tier", "failures"), rows, width, plain=plain)


def _ledger(placements: list[Mapping[str, Any]], width: int, *, plain: bool) -> Table:
    widths = {
        "time": 0, "request": MEDIUM, "tenant": NARROW, "model": MEDIUM, "worker": 0, "policy": NARROW, "prompt": SMALL,
        "expected": NARROW, "actual": 0, "TTFT": 0, "end": 0,
    }  # fmt: skip
    rows: list[Row] = []
    for one in placements:
        actual = one["actual"]
        found = actual["cached_tokens"]
        rows.append(
            {
                "time": datetime.fromtimestamp(one["decided_unix_ms"] / 1000).strftime("%H:%M:%S"),
                "request": _name(one["request_id"]),
                "tenant": _name(one["tenant"]),
                "model": _name(one["model"]),
                "worker": _name(one["worker_id"]),
                "policy": _name(one["policy"]),
                "prompt": f"{one['prompt_tokens']:,}",
                "expected": f"{sum(one['expected_hit_tokens'].values()):,}",
                "actual": NONE if found is None else f"{sum(found.values()):,}",
                "TTFT": milliseconds(actual["ttft_ms"]),
                "end": _name(ending(actual)),
            }
        )
    left = ("time", "request", "tenant", "model", "worker", "policy", "end")
    return _table(widths, left, rows, width, plain=plain)


def ending(actual: Mapping[str, Any]) -> str:
    if actual["ended"]:
        return str(actual["error_code"] or "done")
    if actual["ttft_ms"] is not None:
        return "streaming"
    return "accepted" if actual["accepted"] else "placed"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def rate(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def milliseconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value >= 1000:
        return f"{value / 1000:,.1f} s"
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"
