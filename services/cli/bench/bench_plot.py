"""Runs as one picture: how long which share of requests waited, and tokens over time. Pure.

It is written by hand, as three lines of SVG are no reason to install a plotting library beside a command line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from xml.sax.saxutils import escape

from kvfleet.cli.bench.request_record import SavedRun

WIDTH, HEIGHT, HEAD = 460, 240, 64  # of a panel with its margins; of the title
LEFT, RIGHT, TOP, BOTTOM = 56, 18, 40, 34
COLORS = ("#1f6feb", "#d9480f")
STEPS = 200  # points of a line
LEAST_DECADE = -5  # of events that came in one packet the clock tells nothing
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.t{font-weight:600;font-size:14px;fill:#24292f}"
    ".g{stroke:#d0d7de;stroke-width:1}.l{fill:none;stroke-width:2}"
)

Line = tuple[Sequence[float], Sequence[float]]


def plot_runs(runs: Sequence[SavedRun]) -> str:
    whole = [[record for record in run.records if not record.error] for run in runs]
    waits = [
        ("Time to first token", [[one.ttft_s for one in records] for records in whole]),
        ("Between tokens", [list(chain.from_iterable(one.gaps_s for one in records)) for records in whole]),
        ("End to end", [[one.e2e_s for one in records] for records in whole]),
    ]
    panels = [_waits(title, values) for title, values in waits]
    panels.append(_tokens(runs))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEAD + 2 * HEIGHT}" role="img">',
        f"<title>kvfleet bench</title><style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for number, run in enumerate(runs):
        side = f"{'AB'[number]}: " if len(runs) > 1 else ""
        label = escape(f"{side}{run.about.get('shape', '')}, {run.name}")
        parts.append(f'<text x="16" y="{24 + 20 * number}" style="fill:{COLORS[number]}" class="t">{label}</text>')
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number % 2 * WIDTH},{HEAD + number // 2 * HEIGHT})">{panel}</g>')
    return "".join([*parts, "</svg>\n"])


def _waits(title: str, values: Sequence[Sequence[float]]) -> str:
    """Shares of 0 to 1 over a logarithm of time."""
    every = [value for one in values for value in one if value > 0]
    low = max(math.floor(math.log10(min(every))), LEAST_DECADE) if every else -3
    high = max(math.ceil(math.log10(max(every))), low + 1) if every else 0
    lines = []
    for one in values:
        ordered = sorted(one)
        picked = [round(at * (len(ordered) - 1) / STEPS) for at in range(STEPS + 1)] if ordered else []
        at = [(math.log10(max(ordered[index], 10.0**low)) - low) / (high - low) for index in picked]
        lines.append((at, [step / STEPS for step in range(len(picked))]))
    ticks = [((decade - low) / (high - low), _seconds(10.0**decade)) for decade in range(low, high + 1)]
    return _panel(title, "share of them within so long", lines, ticks, [(0, "0"), (0.5, "50 %"), (1, "100 %")])


def _tokens(runs: Sequence[SavedRun]) -> str:
    """Tokens of each second, evenly over an answer's tokens as they came."""
    span = max((run.duration_s for run in runs), default=1.0) or 1.0
    bins = min(max(int(span), 1), STEPS)
    counts = []
    for run in runs:
        count = [0.0] * bins
        for record in run.records:
            at = record.due_s + record.ttft_s
            for gap in () if record.error else (0.0, *record.gaps_s):
                at += gap
                count[min(int(at / span * bins), bins - 1)] += bins / span
        counts.append(count[: max(math.ceil(run.duration_s / span * bins), 1)])
    most = max((value for count in counts for value in count), default=0.0) or 1.0
    middle = [(number + 0.5) / bins for number in range(bins)]
    lines = [(middle[: len(count)], [value / most for value in count]) for count in counts]
    return _panel(
        "Tokens/s", "over the run's time", lines, [(0, "0 s"), (1, _seconds(span))], [(0, "0"), (1, f"{most:,.0f}")]
    )


def _panel(
    title: str,
    told: str,
    lines: Sequence[Line],
    across: Sequence[tuple[float, str]],
    up: Sequence[tuple[float, str]],
) -> str:
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = [f'<text x="{LEFT}" y="14" class="t">{title}</text><text x="{LEFT}" y="30">{told}</text>']
    for at, label in up:
        y = TOP + tall * (1 - at)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}" class="g"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for at, label in across:
        x = LEFT + wide * at
        parts.append(f'<text x="{x:.1f}" y="{TOP + tall + 18}" text-anchor="middle">{label}</text>')
    for color, (xs, ys) in zip(COLORS, lines, strict=False):
        points = " ".join(f"{LEFT + wide * x:.1f},{TOP + tall * (1 - y):.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(f'<polyline points="{points}" class="l" stroke="{color}"/>')
    return "".join(parts)


def _seconds(value: float) -> str:
    return f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"
