"""`kvfleet top`: the fleet as its dashboard shows it, in a terminal. Over HTTP, as `explain` is."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer
from rich.live import Live

from kvfleet.cli.clients.answers import AnswerFailed, AnswerRefused, asking, client, get, reading
from kvfleet.cli.clients.generate import DEFAULT_URL, Key, Url
from kvfleet.cli.clients.keyboard import Keyboard, Pressed
from kvfleet.cli.clients.top_rates import FleetRates
from kvfleet.cli.clients.top_view import TopSnapshot, page, screen
from kvfleet.cli.console import Terminal, out

TIMEOUT_S = 3.0
LEDGER_LINES = 50
ONCE_LINES = 10
# Wide enough for pipes, so that no name or figure is cut.
plain = Terminal(highlight=False, width=1000, no_color=True)
wide = Terminal(highlight=False)


def top(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print what is there now, and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the same as one line of JSON")] = False,
) -> None:
    """What the fleet does now: workers, tiers, live hit rate, and its last decisions. q or Ctrl-C ends."""
    with asking(url), client(api_key, timeout=TIMEOUT_S) as http:
        fleet = WatchedFleet(http, url)
        first = fleet.look()
        try:
            if out.is_terminal and not out.is_dumb_terminal and not (once or as_json):
                _watch(fleet, first, interval)
                return
            time.sleep(interval)  # a rate is between two looks
            second = fleet.look()
        except KeyboardInterrupt:
            return  # as q: the user has seen enough
        if as_json:
            typer.echo(json.dumps(vars(second)))
        else:
            plain.print(page(second, ONCE_LINES))


@dataclass(eq=False, slots=True)
class WatchedFleet:
    """One ingress, and the counters of its former answers."""

    http: httpx.Client
    url: str
    rates: FleetRates = field(default_factory=FleetRates)
    may_see_all: bool = True

    def look(self) -> TopSnapshot:
        """Raises AnswerFailed."""
        with reading(self.url):
            return self._look()

    def _look(self) -> TopSnapshot:
        rates = self.rates
        stats = workers = health = placements = None
        notes: list[str] = []
        if self.may_see_all:
            try:
                stats, known = self._get("/stats"), self._get("/workers")
                rates.add(known, time.monotonic())
                workers = {
                    name: {
                        **one,
                        "hit_rate_last_minute": rates.hit_rate(name),
                        "tokens_per_s": rates.tokens_per_s(name),
                    }
                    for name, one in known.items()
                }
            except AnswerRefused as error:
                if error.status != 403:
                    raise
                self.may_see_all = False
        if not self.may_see_all:
            health = self._get("/health", 503)
            notes.append("workers and tiers need an admin key; the ledger is that of this key's own tenant")
        try:
            placements = self._get(f"/v1/placements?limit={LEDGER_LINES}")["placements"]
        except AnswerRefused as error:
            if error.status not in (429, 503):
                raise
            notes.append(f"no ledger: {error}")
        total = rates.hit_rate(), rates.tokens_per_s()
        return TopSnapshot(self.url, int(time.time() * 1000), *total, stats, workers, health, placements, tuple(notes))

    def _get(self, path: str, *good: int) -> Any:
        return get(self.http, f"{self.url}{path}", *good)


def _watch(fleet: WatchedFleet, snapshot: TopSnapshot, interval: float) -> None:
    """Until q, Ctrl-C or SIGTERM."""
    trouble, since = "", ""
    with Keyboard() as keyboard, Live(console=wide, screen=True, auto_refresh=False) as live:
        while True:
            next_look = time.monotonic() + interval
            while True:
                live.update(screen(snapshot, trouble, wide.width, wide.height), refresh=True)
                match keyboard.wait(next_look - time.monotonic()):
                    case Pressed.END:
                        return
                    case Pressed.NOTHING:
                        break
                    case Pressed.RESIZED:
                        continue
            try:
                snapshot, trouble, since = fleet.look(), "", ""
            except AnswerFailed as error:
                since = since or time.strftime("%H:%M:%S")
                trouble = f"since {since}: {error}; trying again"
