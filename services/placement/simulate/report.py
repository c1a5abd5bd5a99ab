"""What a study found, as text: an aligned table for people, one object for programs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.autoscaled import as_values as autoscaled_values
from kvfleet.placement.simulate.autoscaled import changes, held, rows
from kvfleet.placement.simulate.figures import Figures
from kvfleet.placement.simulate.study import Study

COLUMNS = (
    "policy", "hits", "of attainable", "TTFT p50", "p99", "load CoV", "max/mean", "goodput/s", "moved", "failed",
)  # fmt: skip


def headline(study: Study) -> list[str]:
    """What was simulated."""
    trace, shape = study.trace, study.shape
    load = "" if study.load is None else f", {study.load:.2f} of capacity"
    return [
        f"{len(trace.arrivals):,} requests in {_duration(trace.duration_s)}{load}; {trace.prompt_tokens:,} prompt "
        f"tokens in {trace.distinct_blocks:,} distinct blocks of {trace.block_tokens}",
        f"{shape.workers:,} workers with {shape.cache_blocks:,} blocks each, {shape.replicas} placement"
        f"{'' if shape.replicas == 1 else 's'}; attainable: {study.attainable_rate:.1%} of prompt tokens",
    ]


def table(study: Study) -> list[str]:
    rows = [COLUMNS, *(_cells(result.figures) for result in study.results)]
    lines = align(rows)
    changed = [result.figures for result in study.results if result.figures.moved_per_change is not None]
    if changed:
        shares = ", ".join(f"{one.policy} {one.moved_per_change:.1%}" for one in changed)
        lines += ["", f"sessions moved by each change of the fleet (1/N is {1 / study.shape.workers:.1%}): {shares}"]
    return lines


def loads_table(study: Study) -> list[str]:
    """Goodput at rising load: a column per load, a row per policy."""
    loads = list(dict.fromkeys(one.load for one in study.at_loads))
    policies = list(dict.fromkeys(one.figures.policy for one in study.at_loads))
    found = {(one.figures.policy, one.load): one.figures for one in study.at_loads}
    rows = [("policy", *(f"at {load:g}" for load in loads))]
    rows += [(_name(name), *(f"{found[name, load].goodput_per_s:.2f}" for load in loads)) for name in policies]
    return [f"requests/s with a first token within {study.slo_s:g} s, by share of capacity:", "", *align(rows)]


def autoscale_table(study: Study) -> list[str]:
    """Against the fixed fleet of the first policy that was run."""
    first, found = study.results[0], study.autoscaled
    lines = align(rows(found, first.figures, held(first.run, study.target_ttft_s)))
    told = [f"{one.victim} goes, ready workers: {changes(one)}" for one in found]
    return [f"a first token within {study.target_ttft_s:g} s is the target:", "", *lines, "", *told]


def as_values(study: Study) -> dict[str, Any]:
    """For JSON, which knows no infinity: null."""
    trace, shape = study.trace, study.shape
    return {
        "default": DEFAULT_POLICY,
        "policies": [_values(result.figures) for result in study.results],
        "loads": [{"load": one.load, **_values(one.figures)} for one in study.at_loads],
        "requests": len(trace.arrivals),
        "duration_s": trace.duration_s,
        "prompt_tokens": trace.prompt_tokens,
        "distinct_blocks": trace.distinct_blocks,
        "block_tokens": trace.block_tokens,
        "attainable_hit_rate": study.attainable_rate,
        "load": study.load,
        "workers": shape.workers,
        "cache_blocks": shape.cache_blocks,
        "replicas": shape.replicas,
        "seed": shape.seed,
        "slo_ttft_s": study.slo_s,
        **_autoscaled(study),
    }


def _autoscaled(study: Study) -> dict[str, Any]:
    if not study.autoscaled:
        return {}
    fixed = held(study.results[0].run, study.target_ttft_s)
    return {
        "target_ttft_s": study.target_ttft_s,
        "fixed_ttft_held": fixed,
        "autoscaled": [autoscaled_values(one) for one in study.autoscaled],
    }


def _values(figures: Figures) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(figures).items()
    }


def _cells(one: Figures) -> tuple[str, ...]:
    return (
        _name(one.policy),
        f"{one.hit_rate:.1%}",
        f"{one.hit_of_attainable:.1%}",
        seconds(one.ttft_p50_s),
        seconds(one.ttft_p99_s),
        f"{one.load_cov:.3f}",
        f"{one.load_max_over_mean:.2f}",
        f"{one.goodput_per_s:.2f}",
        f"{one.moved:.1%}",
        f"{one.failed:,}",
    )


def _name(policy: str) -> str:
    return f"{policy} (default)" if policy == DEFAULT_POLICY else policy


def seconds(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


def _duration(value: float) -> str:
    return f"{value / 60:.1f} min" if value >= 60 else f"{value:.1f} s"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
