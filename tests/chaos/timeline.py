"""The picture of a run: tokens per second and each fault over time, and how long each was felt. Pure."""

from __future__ import annotations

from collections import Counter

from kvfleet.placement.simulate.svg import FAINT, GRID, INK, Axes, Picture, ticks
from tests.chaos.history import History
from tests.chaos.layout import Layout, Role
from tests.chaos.recovery import felt

WIDTH, LEFT, RIGHT = 1000.0, 70.0, 24.0
BIN_S = 1.0
ROW = 18.0
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
    top_of_rows = 330.0
    picture = Picture(WIDTH, top_of_rows + ROW * len(names) + 50)
    picture.text(LEFT, 30, f"{len(history.faults)} faults in {ended - began:.0f} s, under load", size=16, bold=True)
    width, across = WIDTH - LEFT - RIGHT, (began, ended)
    seconds = [(began + tick, f"{tick:.0f} s") for tick in ticks(ended - began, 8)]

    counts = throughput(history)
    highest = max(counts.values(), default=1) / BIN_S
    axes = Axes(LEFT, 60, width, 110, across, (0, highest * 1.05))
    axes.draw_y(picture, [(tick, f"{tick:,.0f}") for tick in ticks(highest, 3)])
    picture.text(LEFT, 52, "tokens or pieces of text that arrived at clients, per second", size=11, color=FAINT)
    bins = range(int(began / BIN_S), int(ended / BIN_S) + 1)
    points = axes.points(((at + 0.5) * BIN_S, counts.get(at, 0) / BIN_S) for at in bins)
    picture.area([(points[0][0], axes.y(0)), *points, (points[-1][0], axes.y(0))], "#0072b2", opacity=0.15)
    picture.line(points, "#0072b2", width=1.2)

    found = [felt(happened, history, layout) for happened in history.faults]
    longest = max((one.gap_s for one in found if one.gap_s is not None), default=1.0)
    axes = Axes(LEFT, 215, width, 90, across, (0, longest * 1.05))
    axes.draw_y(picture, [(tick, f"{tick:g} s") for tick in ticks(longest, 3)])
    picture.text(LEFT, 207, "longest pause of a stream that a fault hit", size=11, color=FAINT)
    for one in found:
        if one.gap_s is not None:
            fault = one.fault.fault
            told = f"{fault.target}: {fault.kind.value}, {one.streams} streams, {one.gap_s:.2f} s"
            picture.dot(axes.x(one.fault.began), axes.y(one.gap_s), _color(fault.target, layout), 3, title=told)

    axes = Axes(LEFT, top_of_rows, width, ROW * len(names), across, (0, 1))
    axes.draw_x(picture, seconds)
    for row, name in enumerate(names):
        y = top_of_rows + ROW * row
        picture.text(LEFT - 8, y + ROW * 0.7, name, size=11, color=INK, anchor="end")
        picture.line([(LEFT, y + ROW), (LEFT + width, y + ROW)], GRID, width=1)
    for happened in history.faults:
        fault = happened.fault
        y = top_of_rows + ROW * names.index(fault.target)
        left, right = axes.x(happened.began), axes.x(min(happened.until, ended))
        told = f"{happened.began - began:.1f} s, {fault.target}: {fault.kind.value}"
        picture.box(left, y + 4, max(right - left, 2.5), ROW - 8, _color(fault.target, layout), title=told)
    picture.text(
        LEFT, top_of_rows + ROW * len(names) + 38, "each bar: from the fault until all is well", size=11, color=FAINT
    )
    return str(picture)


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


def _color(target: str, layout: Layout) -> str:
    return COLORS[Role.NATS if target == "nats" else layout.place(target).role]
