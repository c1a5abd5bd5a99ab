"""A study as one picture: waits, hits, load over time, goodput at rising load. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.figures import Figures, minutes_of, ttfts
from kvfleet.placement.simulate.picture import COLORS, FAINT, as_svg, entitle, head, new_figure, styled, titled
from kvfleet.placement.simulate.report import headline, seconds
from kvfleet.placement.simulate.study import POLICIES, Autoscaled, Result, Study
from kvfleet.placement.workers.workloads import Floats

WIDTH, HEAD = 1100, 80
PANEL = 300  # height of a large panel
SMALL = 168
ACROSS = 3  # small multiples in a row
STEPS = 200  # of a distribution's line
RIGHT: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # of the axes
VICTIM_COLORS = {"cheapest": COLORS[0], "ordinal": COLORS[1]}


def plot(study: Study) -> str:
    with styled():
        return as_svg(draw(study))


def draw(study: Study) -> Figure:
    """Within `styled`."""
    rows = -(-len(study.results) // ACROSS)
    heights = [PANEL, 50 + rows * SMALL, PANEL] + [PANEL] * bool(study.autoscaled)
    figure = new_figure(WIDTH, HEAD + sum(heights))
    head(figure, "kvfleet simulate", *headline(study))
    top, middle, bottom, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    waits, hits = top.subplots(1, 2)
    _waits(waits, study)
    _hits(hits, study)
    _minutes(middle, study, rows)
    goodput, moved = bottom.subplots(1, 2)
    _goodput(goodput, study)
    _moved(moved, study)
    if below:
        _workers(below[0].subplots(), study.autoscaled)
    return figure


def color_of(policy: str) -> str:
    return COLORS[POLICIES.index(policy) % len(COLORS) if policy in POLICIES else -1]


def _waits(axes: Axes, study: Study) -> None:
    entitle(axes, "Time to first token", "share of requests that had theirs within so long; the dot is p99")
    waits = {result.figures.policy: np.sort(ttfts(result.run)) for result in study.results}
    every = np.concatenate([*waits.values(), np.array([1.0])])
    low = math.floor(math.log10(max(float(np.quantile(every, 0.01)), 1e-3)))
    high = math.ceil(math.log10(max(float(every.max()), 10.0 ** (low + 1))))
    decades = [10.0**one for one in range(low, high + 1)]
    axes.set_xscale("log")
    axes.set_xlim(decades[0], decades[-1])
    axes.set_xticks(decades, labels=[_short(one) for one in decades])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for policy, sorted_waits in waits.items():
        shares = np.linspace(0, 1, STEPS if len(sorted_waits) else 0)
        at = np.quantile(sorted_waits, shares) if len(shares) else shares
        axes.plot(at, shares, label=policy, **_line(policy))
        if len(shares):
            p99 = float(np.quantile(sorted_waits, 0.99))
            (dot,) = axes.plot([p99], [0.99], "o", markersize=6, clip_on=False, **_line(policy))
            titled(dot, f"{policy}: p99 {seconds(p99)}")
    axes.legend(**RIGHT)


def _hits(axes: Axes, study: Study) -> None:
    entitle(
        axes,
        "Hits attained of attainable",
        f"attainable: {study.attainable_rate:.1%} of prompt tokens, by one cache as large as all of them",
    )
    axes.axvline(1.0, color=FAINT, linewidth=1, linestyle=":")
    _bars(axes, study, lambda one: one.hit_of_attainable, "{:.1%}")


def _minutes(part: SubFigure, study: Study, rows: int) -> None:
    head(
        part,
        "Prefilled tokens per worker and minute",
        "line: mean over workers; band: from the one with least to the one with most; CoV: its mean over minutes",
    )
    panels = iter(part.subplots(rows, ACROSS, sharex=True, sharey=True, squeeze=False).flatten())
    for result, axes in zip(study.results, panels, strict=False):
        _minutes_of_one(axes, result, minutes_of(result.run, study.trace.duration_s))
    for axes in panels:  # those that are left
        axes.set_visible(False)


def _minutes_of_one(axes: Axes, result: Result, minutes: Sequence[Floats]) -> None:
    one, color = result.figures, color_of(result.figures.policy)
    axes.set_title(f"{one.policy}, CoV {one.load_cov:.3f}", fontsize=12, fontweight="normal", color=color)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g} min"))
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelbottom=True)
    lived = [(number, tokens) for number, tokens in enumerate(minutes) if len(tokens)]
    if lived:
        at, tokens = zip(*lived, strict=True)
        low, high = [one.min() for one in tokens], [one.max() for one in tokens]
        axes.fill_between(at, low, high, color=color, alpha=0.25, linewidth=0)
        axes.plot(at, [one.mean() for one in tokens], color=color)
    axes.set_ylim(bottom=0)


def _goodput(axes: Axes, study: Study) -> None:
    below = f"requests/s with a first token within {study.slo_s:g} s"
    if not study.at_loads:
        entitle(axes, "Goodput", below)
        _bars(axes, study, lambda one: one.goodput_per_s, "{:.2f}/s")
        return
    entitle(axes, "Goodput at rising load", f"{below}, over the share of capacity")
    lines: dict[str, list[tuple[float, float]]] = {}
    for load, one in study.at_loads:
        lines.setdefault(one.policy, []).append((load, one.goodput_per_s))
    for policy, line in lines.items():
        loads, goodputs = zip(*sorted(line), strict=True)
        axes.plot(loads, goodputs, label=policy, **_line(policy))
        for load, goodput in sorted(line):
            (dot,) = axes.plot([load], [goodput], "o", markersize=6, **_line(policy))
            titled(dot, f"{policy} at {load:g}: {goodput:.2f}/s")
    axes.set_xticks(sorted({load for load, _ in study.at_loads}))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(**RIGHT)


def _moved(axes: Axes, study: Study) -> None:
    entitle(axes, "Moved turns", "of turns of a conversation: went to another worker than the turn before")
    _bars(axes, study, lambda one: one.moved, "{:.1%}")


def _workers(axes: Axes, found: Sequence[Autoscaled]) -> None:
    hours = ", ".join(f"{one.victim} goes: {one.worker_hours:.2f}" for one in found)
    entitle(
        axes,
        "Workers over time",
        f"solid: ready; dashed: desired. Worker-hours: {hours}; fixed: {found[0].fixed_worker_hours:.2f}",
    )
    for one in found:
        timeline = [*one.scaling.timeline, one.scaling.timeline[-1]]
        at = [*(moment.at_s / 60 for moment in one.scaling.timeline), one.ended_s / 60]
        color = VICTIM_COLORS.get(one.victim, FAINT)
        axes.step(at, [moment.desired for moment in timeline], color=color, where="post", linewidth=1, linestyle="--")
        axes.step(at, [moment.ready for moment in timeline], color=color, where="post", linewidth=2)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g} min"))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _bars(axes: Axes, study: Study, read: Callable[[Figures], float], form: str) -> None:
    """Horizontal, the first on top."""
    policies = [result.figures.policy for result in study.results]
    lengths = [read(result.figures) for result in study.results]
    said = [form.format(length) for length in lengths]
    places = range(len(policies))
    bars = axes.barh(places, lengths, height=0.7, color=[color_of(policy) for policy in policies])
    axes.bar_label(bars, said, padding=6)
    axes.set_yticks(places, labels=policies)
    for bar, policy, text, label in zip(bars, policies, said, axes.get_yticklabels(), strict=True):
        titled(bar, f"{policy}: {text}")
        label.set_fontweight("bold" if policy == DEFAULT_POLICY else "normal")
    axes.set_ylim(max(len(policies), len(POLICIES)) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(labelbottom=False, bottom=False)


def _line(policy: str) -> dict[str, Any]:
    """Nothing is drawn over the default policy's."""
    is_default = policy == DEFAULT_POLICY
    return {"color": color_of(policy), "linewidth": 2.5 if is_default else 1.5, "zorder": 2.1 if is_default else 2.0}


def _short(value: float) -> str:
    return f"{value * 1000:g} ms" if value < 1 else f"{value:,.0f} s"
