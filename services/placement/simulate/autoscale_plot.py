"""The panel of a fleet that grows and shrinks: workers over time. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvfleet.placement.simulate.autoscaled import Autoscaled
from kvfleet.placement.simulate.svg import FAINT, Axes, Picture, ticks

COLORS = {"cheapest": "#0072b2", "ordinal": "#d55e00"}


def draw_workers(
    picture: Picture, left: float, top: float, width: float, height: float, found: Sequence[Autoscaled]
) -> None:
    """Steps: solid lines are ready workers, dashed ones what was desired."""
    picture.text(left, top, "Workers over time", size=14, bold=True)
    hours = ", ".join(f"{one.victim} goes: {one.worker_hours:.2f}" for one in found)
    picture.text(
        left,
        top + 16,
        f"solid: ready; dashed: desired. Worker-hours: {hours}; fixed: {found[0].fixed_worker_hours:.2f}",
        size=11,
        color=FAINT,
    )
    minutes = max(one.ended_s for one in found) / 60
    most = max(max(moment.desired, moment.ready) for one in found for moment in one.scaled.timeline)
    axes = Axes(left + 40, top + 30, width - 40, height, (0, max(minutes, 1e-9)), (0, most + 0.5))
    axes.draw_x(picture, [(value, f"{value:g} min") for value in ticks(axes.x_range[1], 8)])
    axes.draw_y(picture, [(value, f"{value:g}") for value in ticks(axes.y_range[1]) if value == int(value)])
    for one in found:
        timeline = one.scaled.timeline
        color = COLORS.get(one.victim, FAINT)
        for values, dash in (([m.desired for m in timeline], "4 3"), ([m.ready for m in timeline], "")):
            at = [m.at_s / 60 for m in timeline] + [one.ended_s / 60]
            stairs = []
            for number, value in enumerate(values):
                stairs += [(at[number], value), (at[number + 1], value)]
            picture.line(axes.points(stairs), color, width=1 if dash else 2, dash=dash)
