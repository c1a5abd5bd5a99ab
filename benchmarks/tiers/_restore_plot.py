"""The curves of `restore_ttft --lengths`: how much sooner than cold the first token comes, by where the history was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfleet.placement.simulate.svg import FAINT, Axes, Picture, ticks

COLORS = {"device": "#0072b2", "host": "#009e73", "vault": "#d55e00"}
WIDTH, HEIGHT = 760, 420


def write_plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """`rows`: model, tokens, and seconds for cold, device, host and vault."""
    picture = Picture(WIDTH, HEIGHT)
    picture.text(28, 34, "Time to first token: how many times sooner than cold", size=16, bold=True)
    models = list(dict.fromkeys(row["model"] for row in rows))
    picture.text(28, 54, "; ".join(f"{model}: {_lengths(rows, model)}" for model in models), color=FAINT)
    highest = max(row["cold"] / row[way] for row in rows for way in COLORS)
    lengths = [row["tokens"] for row in rows]
    axes = Axes(64, 80, WIDTH - 190, HEIGHT - 130, (lengths[0] * 0.9, lengths[-1] * 1.1), (0, highest * 1.05), True)
    axes.draw_x(picture, [(length, f"{length:,}") for length in lengths])
    axes.draw_y(picture, [(tick, f"{tick:g}x") for tick in ticks(highest)])
    picture.text(64 + axes.width / 2, HEIGHT - 12, "cached tokens", color=FAINT, anchor="middle")
    for number, (way, color) in enumerate(COLORS.items()):
        for model in models:
            points = axes.points((row["tokens"], row["cold"] / row[way]) for row in rows if row["model"] == model)
            picture.line(points, color, width=2)
            for (x, y), row in zip(points, (row for row in rows if row["model"] == model), strict=True):
                picture.dot(x, y, color, title=f"{row['tokens']:,} tokens, {way}: {row[way] * 1000:.0f} ms")
        picture.line([(WIDTH - 110, 100 + 24 * number), (WIDTH - 86, 100 + 24 * number)], color, width=3)
        picture.text(WIDTH - 80, 104 + 24 * number, f"from the {way}")
    path.write_text(str(picture))


def _lengths(rows: Sequence[dict[str, Any]], model: str) -> str:
    tokens = [row["tokens"] for row in rows if row["model"] == model]
    return f"{tokens[0]:,} to {tokens[-1]:,} tokens" if len(tokens) > 1 else f"{tokens[0]:,} tokens"
