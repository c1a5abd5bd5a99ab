"""A study as one picture: who waits how long, what was hit, who worked when, what a rising load leaves. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.autoscale_plot import draw_workers
from kvfleet.placement.simulate.figures import minutes_of, ttfts
from kvfleet.placement.simulate.report import headline, seconds
from kvfleet.placement.simulate.study import POLICIES, Result, Study
from kvfleet.placement.simulate.svg import FAINT, Axes, Picture, ticks
from kvfleet.placement.workers.workloads import Floats

T = TypeVar("T")

# Okabe and Ito's colours, which people who see few colours tell apart too.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a8f98", "#b8860b", "#56b4e9")
WIDTH, MARGIN, GAP = 1100, 28, 44
HALF = (WIDTH - 2 * MARGIN - GAP) / 2
PANEL = 210  # height of a large panel's axes
SMALL = 110
LABELS = 56  # left of an axis
NAMES = 100  # left of bars
ACROSS = 3  # small multiples in a row
STEPS = 200  # of a distribution's line


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a panel begins."""

    picture: Picture
    left: float
    top: float

    def title(self, title: str, below: str = "") -> None:
        self.picture.text(self.left, self.top, title, size=14, bold=True)
        if below:
            self.picture.text(self.left, self.top + 16, below, size=11, color=FAINT)


def plot(study: Study) -> str:
    """SVG; needs results."""
    rows = -(-len(study.results) // ACROSS)
    per_row = SMALL + 58
    tops = [124, 124 + PANEL + 96]
    tops.append(tops[1] + 34 + rows * per_row + 24)
    last = tops[2] + 34 + PANEL + 50
    picture = Picture(WIDTH, last + (PANEL + 80 if study.autoscaled else 0))
    if study.autoscaled:
        draw_workers(picture, MARGIN, last + 20, WIDTH - 2 * MARGIN, PANEL, study.autoscaled)
    picture.text(MARGIN, 40, "kvfleet simulate", size=20, bold=True)
    for number, line in enumerate(headline(study)):
        picture.text(MARGIN, 62 + 17 * number, line, size=12, color=FAINT)
    right = MARGIN + HALF + GAP
    _waits(_Place(picture, MARGIN, tops[0]), study)
    _hits(_Place(picture, right, tops[0]), study)
    _minutes(_Place(picture, MARGIN, tops[1]), study, per_row)
    _goodput(_Place(picture, MARGIN, tops[2]), study)
    _moved(_Place(picture, right, tops[2]), study)
    return str(picture)


def color_of(policy: str) -> str:
    return COLORS[POLICIES.index(policy) if policy in POLICIES else -1]


# ------------------------------------------------------------------ panels


def _waits(place: _Place, study: Study) -> None:
    place.title("Time to first token", "share of requests that had theirs within so long; the dot is p99")
    waits = {result.figures.policy: np.sort(ttfts(result.run)) for result in study.results}
    every = np.concatenate([*waits.values(), np.array([1.0])])
    low = 10.0 ** math.floor(math.log10(max(float(np.quantile(every, 0.01)), 1e-3)))
    high = 10.0 ** math.ceil(math.log10(max(float(every.max()), low * 10)))
    axes = Axes(place.left + LABELS, place.top + 30, HALF - LABELS - NAMES, PANEL, (low, high), (0, 1), log_x=True)
    decades = range(round(math.log10(low)), round(math.log10(high)) + 1)
    axes.draw_x(place.picture, [(10.0**one, _short(10.0**one)) for one in decades])
    axes.draw_y(place.picture, [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)])
    for policy, sorted_waits in _default_last(waits):
        if not len(sorted_waits):
            continue
        shares = np.linspace(0, 1, STEPS)
        at = np.quantile(sorted_waits, shares)
        width = 2.5 if policy == DEFAULT_POLICY else 1.5
        place.picture.line(axes.points(zip(at.tolist(), shares.tolist(), strict=True)), color_of(policy), width=width)
        p99 = float(np.quantile(sorted_waits, 0.99))
        place.picture.dot(axes.x(p99), axes.y(0.99), color_of(policy), title=f"{policy}: p99 {seconds(p99)}")
    _legend(place.picture, axes.left + axes.width + 14, axes.top + 12, list(waits))


def _hits(place: _Place, study: Study) -> None:
    place.title(
        "Hits attained of attainable",
        f"attainable: {study.attainable_rate:.1%} of prompt tokens, by one cache as large as all of them",
    )
    values = [(one.figures.policy, one.figures.hit_of_attainable) for one in study.results]
    _bars(place, values, lambda value: f"{value:.1%}", full=1.0)


def _minutes(place: _Place, study: Study, per_row: float) -> None:
    place.title(
        "Prefilled tokens per worker and minute",
        "line: mean over workers; band: from the one with least to the one with most; CoV: its mean over minutes",
    )
    found = [(result, minutes_of(result.run, study.trace.duration_s)) for result in study.results]
    most = max((float(tokens.max()) for _, minutes in found for tokens in minutes if len(tokens)), default=1.0)
    width = (WIDTH - 2 * MARGIN - (ACROSS - 1) * 20) / ACROSS
    for number, (result, minutes) in enumerate(found):
        left = place.left + (number % ACROSS) * (width + 20)
        top = place.top + 48 + (number // ACROSS) * per_row
        axes = Axes(left + LABELS, top, width - LABELS - 6, SMALL, (0, max(len(minutes) - 1, 1)), (0, most * 1.05))
        _minutes_of_one(place.picture, axes, result, minutes)


def _minutes_of_one(picture: Picture, axes: Axes, result: Result, minutes: Sequence[Floats]) -> None:
    one = result.figures
    axes.draw_y(picture, [(value, _short_count(value)) for value in ticks(axes.y_range[1], 3)])
    axes.draw_x(picture, [(value, f"{value:g} min") for value in ticks(axes.x_range[1], 4)])
    picture.text(axes.left, axes.top - 6, f"{one.policy}, CoV {one.load_cov:.3f}", size=12, color=color_of(one.policy))
    lived = [(number, tokens) for number, tokens in enumerate(minutes) if len(tokens)]
    if not lived:
        return
    low = axes.points((number, float(tokens.min())) for number, tokens in lived)
    high = axes.points((number, float(tokens.max())) for number, tokens in lived)
    color = color_of(one.policy)
    picture.area([*high, *reversed(low)], color, opacity=0.25)
    picture.line(axes.points((number, float(tokens.mean())) for number, tokens in lived), color)


def _goodput(place: _Place, study: Study) -> None:
    below = f"requests/s with a first token within {study.slo_s:g} s"
    if not study.at_loads:
        place.title("Goodput", below)
        values = [(one.figures.policy, one.figures.goodput_per_s) for one in study.results]
        _bars(place, values, lambda value: f"{value:.2f}/s")
        return
    place.title("Goodput at rising load", f"{below}, over the share of capacity")
    loads = [one.load for one in study.at_loads]
    most = max(one.figures.goodput_per_s for one in study.at_loads)
    width = HALF - LABELS - NAMES
    axes = Axes(place.left + LABELS, place.top + 30, width, PANEL, (0, max(loads) * 1.03), (0, max(most, 1e-9) * 1.05))
    axes.draw_x(place.picture, [(load, f"{load:g}") for load in dict.fromkeys(loads)])
    axes.draw_y(place.picture, [(value, f"{value:g}") for value in ticks(axes.y_range[1])])
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in study.at_loads:
        lines.setdefault(one.figures.policy, []).append((one.load, one.figures.goodput_per_s))
    for policy, line in _default_last(lines):
        points = axes.points(sorted(line))
        place.picture.line(points, color_of(policy), width=2.5 if policy == DEFAULT_POLICY else 1.5)
        for (load, goodput), (x, y) in zip(sorted(line), points, strict=True):
            place.picture.dot(x, y, color_of(policy), title=f"{policy} at {load:g}: {goodput:.2f}/s")
    _legend(place.picture, axes.left + axes.width + 14, axes.top + 12, list(lines))


def _moved(place: _Place, study: Study) -> None:
    place.title("Moved turns", "of turns of a conversation: went to another worker than the turn before")
    _bars(place, [(one.figures.policy, one.figures.moved) for one in study.results], lambda value: f"{value:.1%}")


# ------------------------------------------------------------------ parts of panels


def _bars(
    place: _Place, values: Sequence[tuple[str, float]], say: Callable[[float], str], *, full: float | None = None
) -> None:
    """Lying ones; `full`: where a line says how much there is."""
    most = max([*(value for _, value in values), full or 0.0, 1e-9])
    axes = Axes(place.left + NAMES, place.top + 30, HALF - NAMES - LABELS, PANEL, (0, most), (0, 1))
    each = min(PANEL / len(values), 36)
    if full is not None:
        x, bottom = axes.x(full), axes.top + each * len(values)
        place.picture.line([(x, axes.top - 4), (x, bottom)], FAINT, width=1, dash="3 3")
    for number, (policy, value) in enumerate(values):
        top = axes.top + each * number
        place.picture.text(axes.left - 8, top + each / 2 + 2, policy, anchor="end", bold=policy == DEFAULT_POLICY)
        ends = axes.x(value)
        title = f"{policy}: {say(value)}"
        place.picture.box(axes.left, top + 3, ends - axes.left, each - 9, color_of(policy), title=title)
        place.picture.text(ends + 6, top + each / 2 + 2, say(value), halo=True)


def _default_last(of: Mapping[str, T]) -> list[tuple[str, T]]:
    """So that nothing is drawn over it."""
    return sorted(of.items(), key=lambda item: item[0] == DEFAULT_POLICY)


def _legend(picture: Picture, left: float, top: float, policies: Sequence[str]) -> None:
    for number, policy in enumerate(policies):
        y = top + 19 * number
        picture.line([(left, y - 4), (left + 16, y - 4)], color_of(policy), width=3)
        picture.text(left + 22, y, policy, size=12)


def _short(value: float) -> str:
    return f"{value * 1000:g} ms" if value < 1 else f"{value:,.0f} s"


def _short_count(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1000 else f"{value:g}"
