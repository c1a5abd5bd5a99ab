"""The curves of `restore_ttft --lengths`: how much sooner than cold the first token comes, by where the history was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullLocator, StrMethodFormatter

from kvfleet.placement.simulate.picture import as_svg, entitle, new_figure, styled, titled

COLORS = {"device": "#0072b2", "host": "#009e73", "vault": "#d55e00"}
WIDTH, HEIGHT = 760, 420


def write_plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """`rows`: model, tokens, and seconds for cold, device, host and vault."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lengths = [row["tokens"] for row in rows]
    with styled():
        figure = new_figure(WIDTH, HEIGHT)
        axes = figure.subplots()
        below = "; ".join(f"{model}: {_lengths(rows, model)}" for model in models)
        entitle(axes, "Time to first token: how many times sooner than cold", below)
        for way, color in COLORS.items():
            for model in models:
                of_model = [row for row in rows if row["model"] == model]
                times = [row["cold"] / row[way] for row in of_model]
                label = f"from the {way}" if model == models[0] else None
                axes.plot([row["tokens"] for row in of_model], times, color=color, linewidth=2, label=label)
                for row, ratio in zip(of_model, times, strict=True):
                    (dot,) = axes.plot([row["tokens"]], [ratio], "o", color=color, markersize=6)
                    titled(dot, f"{row['tokens']:,} tokens, {way}: {row[way] * 1000:.0f} ms")
        axes.set_xscale("log")
        axes.set_xticks(lengths, labels=[f"{length:,}" for length in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("cached tokens")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}x"))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        path.write_text(as_svg(figure))


def _lengths(rows: Sequence[dict[str, Any]], model: str) -> str:
    tokens = [row["tokens"] for row in rows if row["model"] == model]
    return f"{tokens[0]:,} to {tokens[-1]:,} tokens" if len(tokens) > 1 else f"{tokens[0]:,} tokens"
