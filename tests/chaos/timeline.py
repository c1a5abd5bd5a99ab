"""The picture of a run: tokens per second and each fault over time, and how long each was felt. Pure."""

from __future__ import annotations

from collections import Counter

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from kvfleet.placement.simulate.picture import FAINT, as_svg, head, new_figure, styled, titled
from tests.chaos.history import Happened, History
from tests.chaos.layout import Layout, Role
from tests.chaos.recovery import felt

WIDTH = 1000.0
THROUGHPUT, PAUSES, ROW = 150.0, 130.0, 18.0  # heights
BIN_S = 1.0
LEAST_PX = 2.5  # of a bar: the shortest fault is seen too
COLORS = {
    Role.WORKER: "#0072b2",
    Role.INGRESS: "#009e73",
    Role.PLACEMENT: "#e69f00",
    Role.VAULT: "#cc79a7",
    Role.CLIENT: "#56b4e9",
    Role.NATS: "#d55e00",
}


def timeline(history: History, layout: Layout) -> str:
    """SVG: throughput above, then how long faults were felt, then a row for each process with what happened to it."""
    began, ended = span(history)
    names = [place.name for place in layout.places] + ["nats"]
    heights = [THROUGHPUT, PAUSES, ROW * len(names) + 50]
    with styled():
        figure = new_figure(WIDTH, sum(heights) + 40)
        head(figure, f"{len(history.faults)} faults in {ended - began:.0f} s, under load")
        tokens, pauses, rows = figure.subplots(3, 1, sharex=True, height_ratios=heights)
        _throughput(tokens, history, began, ended)
        _pauses(pauses, history, layout, began)
        _rows(rows, history, layout, names, began, ended)
        rows.set_xlim(0, ended - began)
        return as_svg(figure)


def span(history: History) -> tuple[float, float]:
    """From the first request to the last."""
    times = [one.began for one in history.exchanges]
    ends = [one.done_at for one in history.exchanges if one.done_at is not None]
    return min(times, default=0.0), max(ends, default=1.0)


def throughput(history: History) -> Counter[int]:
    """Tokens by bin; a piece of text without ids is taken as one."""
    out: Counter[int] = Counter()
    for exchange in history.exchanges:
        for piece in exchange.pieces:
            out[int(piece.at / BIN_S)] += len(piece.ids) or 1
    return out


def _throughput(axes: Axes, history: History, began: float, ended: float) -> None:
    _say(axes, "tokens or pieces of text that arrived at clients, per second")
    counts = throughput(history)
    bins = range(int(began / BIN_S), int(ended / BIN_S) + 1)
    at = [(one + 0.5) * BIN_S - began for one in bins]
    rates = [counts.get(one, 0) / BIN_S for one in bins]
    axes.fill_between(at, rates, color=COLORS[Role.WORKER], alpha=0.15, linewidth=0)
    axes.plot(at, rates, color=COLORS[Role.WORKER], linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _pauses(axes: Axes, history: History, layout: Layout, began: float) -> None:
    _say(axes, "longest pause of a stream that a fault hit")
    for happened in history.faults:
        one = felt(happened, history, layout)
        if one.gap_s is not None:
            fault = happened.fault
            (dot,) = axes.plot([happened.began - began], [one.gap_s], "o", color=_color(happened, layout), markersize=5)
            titled(dot, f"{fault.target}: {fault.kind.value}, {one.streams} streams, {one.gap_s:.2f} s")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g} s"))


def _rows(axes: Axes, history: History, layout: Layout, names: list[str], began: float, ended: float) -> None:
    _say(axes, "each bar: from the fault until all is well")
    least = LEAST_PX / WIDTH * (ended - began)
    for happened in history.faults:
        fault = happened.fault
        lasted = max(min(happened.until, ended) - happened.began, least)
        row = names.index(fault.target)
        (bar,) = axes.barh(row, lasted, left=happened.began - began, height=0.55, color=_color(happened, layout))
        titled(bar, f"{happened.began - began:.1f} s, {fault.target}: {fault.kind.value}")
    axes.set_yticks(range(len(names)), labels=names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g} s"))


def _say(axes: Axes, what: str) -> None:
    axes.set_title(what, fontsize=11, fontweight="normal", color=FAINT)


def _color(happened: Happened, layout: Layout) -> str:
    target = happened.fault.target
    return COLORS[Role.NATS if target == "nats" else layout.place(target).role]
