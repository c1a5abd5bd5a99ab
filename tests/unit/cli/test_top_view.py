"""What `kvfleet top` draws: as many lines as the terminal has, no more; and nothing that commands it."""

from __future__ import annotations

from dataclasses import asdict, replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kvfleet.cli.clients.top_view import TopSnapshot, milliseconds, page, rate, screen, share
from kvfleet.cli.console import printable
from kvproto.messages import Load, TierLoad

HOST = asdict(TierLoad(3, 300_000, 1_000_000, 48, 2, 600, 0.25, 7, 1, {"late": 2, "lost": 0}))


def a_worker(
    state: str = "ready", rates: tuple[float | None, float | None] = (None, None), **load: int
) -> dict[str, Any]:
    whole = asdict(Load(running=2, waiting=1, blocks_used=10, blocks_cached=20, blocks_total=100, oldest_wait_s=1.5))
    return {
        "state": state, "model": "demo", "engine": "own", "host": "node-1", "epoch": "e", "load": {**whole, **load},
        "hit_rate_last_minute": rates[0], "tokens_per_s": rates[1],
    }  # fmt: skip


def a_placement(request: str = "r1", **changes: Any) -> dict[str, Any]:
    actual = {"accepted": True, "cached_tokens": {"device": 16}, "ttft_ms": 12.0, "ended": True, "error_code": None}
    return {
        "request_id": request, "tenant": "acme", "model": "demo", "worker_id": "w0", "policy": "cost",
        "decided_unix_ms": 1_763_700_000_000, "prompt_tokens": 40, "expected_hit_tokens": {"device": 32, "host": 1},
        "actual": {**actual, **changes},
    }  # fmt: skip


def a_snapshot(workers: int = 3, placements: int = 40) -> TopSnapshot:
    known = {f"w{number}": a_worker(rates=(None, None) if number else (0.75, 8.25)) for number in range(workers)}
    load = asdict(Load(running=6, waiting=3, blocks_total=300, hit_tokens_total=100))
    stats = {
        "ready": workers, "workers": workers, "placements": 2, "vaults": 1, "models": ["demo"], "hit_rate": 0.5,
        "load": {**load, "tiers": {"host": HOST, "vault": asdict(TierLoad(hit_tokens_total=2))}},
    }  # fmt: skip
    return TopSnapshot(
        "http://x:1", 1000, 0.9, 123.4, stats, known, None, [a_placement(f"r{number}") for number in range(placements)],
    )  # fmt: skip


def lines(snapshot: TopSnapshot, width: int, height: int, trouble: str = "") -> list[str]:
    console = Console(file=StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(screen(snapshot, trouble, width, height))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_a_worker_for_one_half_of_requests_says_so() -> None:
    snapshot = a_snapshot(workers=2)
    assert snapshot.workers is not None
    snapshot.workers["w1"] |= {"role": "prefill"}
    shown = [line for line in lines(snapshot, 200, 40) if " w0 " in f" {line}" or " w1 " in f" {line}"]
    assert ["own, prefill" in line for line in shown[:2]] == [False, True]


@pytest.mark.parametrize("width", [44, 90, 200])
@pytest.mark.parametrize("height", [14, 24, 60])
@pytest.mark.parametrize("workers", [0, 3, 80])
def test_it_fits_terminals_of_all_sizes(width: int, height: int, workers: int) -> None:
    shown = lines(a_snapshot(workers), width, height)
    assert len(shown) <= height
    assert max(len(line) for line in shown) <= width
    assert shown[0].startswith("kvfleet http://x:1")
    assert shown[-1].strip() == "q ends"
    named = sum(line.startswith("w") and "ready" in line and not line.startswith("workers") for line in shown)
    rest = [line for line in shown if "further workers" in line]
    assert named == workers or rest[0].strip() == f"and {workers - named} further workers"


@pytest.mark.parametrize(
    ("loading", "said"),
    [({"doing": "loading weights", "weight_bytes": 30, "total_bytes": 40}, "w0 loading weights 75% demo"),
     ({"doing": "importing torch", "weight_bytes": 0, "total_bytes": 0}, "w0 importing torch demo"),
     (None, "w0 starting demo")],
)  # fmt: skip
def test_a_starting_worker_tells_what_it_does(loading: dict[str, Any] | None, said: str) -> None:
    snapshot = replace(a_snapshot(), workers={"w0": a_worker("starting") | {"loading": loading}})
    assert any(" ".join(line.split()).startswith(said) for line in lines(snapshot, 160, 50))


def test_a_wide_one_shows_all_of_it() -> None:
    text = [" ".join(line.split()) for line in lines(a_snapshot(), 160, 50)]
    assert "workers ready 3 of 3, placements 2, vaults 1, models demo" in text
    assert "6 running, 3 queued, 123 tokens/s, hit rate 90.0% (last minute), 50.0% (all)" in text
    assert "w0 ready demo own node-1 2 1 10 of 100 20 75.0% 8.2 1.5 s" in text
    assert "w1 ready demo own node-1 2 1 10 of 100 20 - - 1.5 s" in text
    assert "device 0 of 300 0.0% 50 - - 0 -" in text
    assert "host 3 293.0 KiB of 976.6 KiB 48 600 B 7 1 late 2" in text
    assert "vault - - 2 0 B 0 0 none" in text
    assert any(line.endswith("r0 acme demo w0 cost 40 33 16 12 ms done") for line in text)


def test_a_dead_worker_has_no_figures() -> None:
    dead = replace(a_snapshot(1), workers={"w0": a_worker("dead")})
    text = [" ".join(line.split()) for line in lines(dead, 160, 50)]
    assert "w0 dead demo own node-1 - - - - - - -" in text


def test_a_key_that_may_not_see_workers() -> None:
    health = {"workers_ready": 2, "placements": 1, "vaults": 0, "models": ["demo"]}
    note = "workers and tiers need an admin key"
    snapshot = replace(a_snapshot(), stats=None, workers=None, health=health, notes=(note,))
    text = "\n".join(lines(snapshot, 100, 20))
    assert "workers ready 2, placements 1, vaults 0, models demo" in text
    assert "need an admin key" in text
    assert "TTFT" in text
    assert "oldest wait" not in text


def test_trouble_is_said_and_the_rest_stays() -> None:
    shown = lines(a_snapshot(), 100, 24, "since 10:00:00: http://x:1: refused; trying again")
    assert shown[-1].startswith("since 10:00:00")
    assert any(line.startswith("w0") for line in shown)


def test_names_neither_command_the_terminal_nor_are_markup() -> None:
    evil = "\x1b[2J\x07[bold]x[/bold]"
    snapshot = a_snapshot(1)
    assert snapshot.workers is not None
    worker = {**snapshot.workers["w0"], "model": evil, "engine": evil, "host": evil}
    stats = {**(snapshot.stats or {}), "models": [evil]}
    snapshot = replace(
        snapshot,
        workers={"w0": worker},
        stats=stats,
        placements=[{**a_placement(), "tenant": evil, "request_id": evil}],
    )
    text = "\n".join(lines(snapshot, 200, 40, trouble=evil))
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert text.count("\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}[bold]x[/bold]") == 7
    assert printable("a b\n\u202ec") == "a b\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}c"


def test_plain_text_has_all_workers_and_as_many_decisions_as_asked_for() -> None:
    console = Console(file=StringIO(), width=1000, no_color=True)
    console.print(page(a_snapshot(80), 10))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert sum(line.startswith("w") and " ready " in line for line in text.splitlines()) == 80 + 1
    assert text.count(" acme ") == 10


def test_json_has_the_rates_beside_what_was_said() -> None:
    told = vars(a_snapshot(2))
    assert (told["hit_rate_last_minute"], told["tokens_per_s"], told["unix_ms"]) == (0.9, 123.4, 1000)
    assert told["workers"]["w0"]["hit_rate_last_minute"] == 0.75
    assert told["workers"]["w1"]["tokens_per_s"] is None
    assert told["workers"]["w1"]["load"]["running"] == 2
    assert len(told["placements"]) == 40


def test_how_figures_are_written() -> None:
    assert [share(None), share(0.0), share(0.1234)] == ["-", "0.0%", "12.3%"]
    assert [rate(None), rate(0.0), rate(9.94), rate(1234.5)] == ["-", "0.0", "9.9", "1,234"]
    assert [milliseconds(value) for value in (None, 1.25, 12.6, 1500.0)] == ["-", "1.2 ms", "13 ms", "1.5 s"]
