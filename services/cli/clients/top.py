"""`kvfleet top`: the fleet as its dashboard shows it, in a terminal. Over HTTP, as `explain` is."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import httpx
import typer
from rich.live import Live

from kvfleet.cli.clients import sse
from kvfleet.cli.clients.answers import Unreadable, asking, json_of, shaped_as_an_ingress_says
from kvfleet.cli.clients.generate import DEFAULT_URL, Key, Url, headers
from kvfleet.cli.clients.keyboard import Keyboard, Pressed
from kvfleet.cli.clients.top_rates import FleetRates
from kvfleet.cli.clients.top_view import TopSnapshot, page, screen
from kvfleet.cli.console import Terminal, fail, out

TIMEOUT_S = 3.0
LEDGER_LINES = 50
ONCE_LINES = 10
# A line that is cut loses names and figures: where nobody looks at it, it is as long as it has to be.
plain = Terminal(highlight=False, width=1000, no_color=True)
wide = Terminal(highlight=False)


class TopRefused(Exception):
    """The ingress answered, and not with what was asked for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


TROUBLES = (httpx.HTTPError, TopRefused, Unreadable)


def top(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print what is there now, and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the same as one line of JSON")] = False,
) -> None:
    """What the fleet does now: workers, tiers, live hit rate, and its last decisions. q or Ctrl-C ends."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, headers=headers(api_key)) as http:
        fleet = WatchedFleet(http, url)
        try:
            first = fleet.look()
        except TROUBLES as error:
            fail(_told(url, error))
        try:
            if out.is_terminal and not out.is_dumb_terminal and not (once or as_json):
                _watch(fleet, first, interval)
                return
            time.sleep(interval)  # a rate is between two looks
            second = fleet.look()
        except KeyboardInterrupt:
            return  # as q: the user has seen enough
        except TROUBLES as error:
            fail(_told(url, error))
        if as_json:
            typer.echo(json.dumps(second.as_map()))
        else:
            with asking(url):
                plain.print(page(second, ONCE_LINES))


class WatchedFleet:
    """One ingress that is asked again and again, and what it said before."""

    def __init__(self, http: httpx.Client, url: str) -> None:
        self._http = http
        self.url = url
        self._rates = FleetRates()
        self._may_see_all = True

    def look(self) -> TopSnapshot:
        """Raises Refused, Unreadable, or httpx's errors where nothing answers."""
        with shaped_as_an_ingress_says(self.url):
            return self._look()

    def _look(self) -> TopSnapshot:
        stats = workers = health = placements = None
        notes: list[str] = []
        if self._may_see_all:
            try:
                stats, workers = self._get("/stats"), self._get("/workers")
                self._rates.add(workers, time.monotonic())
            except TopRefused as error:
                if error.status != 403:
                    raise
                self._may_see_all = False
        if not self._may_see_all:
            health = self._get("/health")
            notes.append("workers and tiers need an admin key; the ledger is that of this key's own tenant")
        try:
            placements = self._get(f"/v1/placements?limit={LEDGER_LINES}")["placements"]
        except TopRefused as error:
            if error.status not in (429, 503):
                raise
            notes.append(f"no ledger: {error}")
        rates = self._rates
        return TopSnapshot(
            self.url,
            time.time(),
            stats,
            workers,
            health,
            placements,
            rates.hit_rate(),
            rates.tokens_per_s(),
            {name: (rates.hit_rate(name), rates.tokens_per_s(name)) for name in workers or ()},
            tuple(notes),
        )

    def _get(self, path: str) -> Any:
        answer = self._http.get(path)
        if answer.status_code == 200 or (path == "/health" and answer.status_code == 503):
            return json_of(answer)
        raise TopRefused(answer.status_code, sse.error_text(answer))


def _told(url: str, error: Exception) -> str:
    if isinstance(error, TopRefused | Unreadable):
        return str(error)
    return f"{url}: {error or type(error).__name__}"


def _watch(fleet: WatchedFleet, snapshot: TopSnapshot, interval: float) -> None:
    """Until q, Ctrl-C or SIGTERM; the terminal is left as it was."""
    trouble, since = "", ""
    with Keyboard() as keyboard, Live(console=wide, screen=True, auto_refresh=False) as live:
        while True:
            next_look = time.monotonic() + interval
            while True:
                with asking(fleet.url):
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
            except TROUBLES as error:
                since = since or time.strftime("%H:%M:%S")
                trouble = f"since {since}: {_told(fleet.url, error)}; trying again"
