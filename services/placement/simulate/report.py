"""A study as text: aligned tables for people, one JSON object for programs. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.figures import Figures, held
from kvfleet.placement.simulate.study import Autoscaled, Study

COLUMNS: dict[str, Callable[[Figures], str]] = {
    "policy": lambda one: _name(one.policy),
    "hits": lambda one: f"{one.hit_rate:.1%}",
    "of attainable": lambda one: f"{one.hit_of_attainable:.1%}",
    "TTFT p50": lambda one: seconds(one.ttft_p50_s),
    "p99": lambda one: seconds(one.ttft_p99_s),
    "ITL p99": lambda one: seconds(one.itl_p99_s),
    "load CoV": lambda one: f"{one.load_cov:.3f}",
    "max/mean": lambda one: f"{one.load_max_over_mean:.2f}",
    "goodput/s": lambda one: f"{one.goodput_per_s:.2f}",
    "moved": lambda one: f"{one.moved:.1%}",
    "failed": lambda one: f"{one.failed:,}",
}


def headline(study: Study) -> list[str]:
    trace, shape = study.trace, study.shape
    load = "" if study.load is None else f", {study.load:.2f} of capacity"
    return [
        f"{len(trace.arrivals):,} requests in {_duration(trace.duration_s)}{load}; {trace.prompt_tokens:,} prompt "
        f"tokens in {trace.distinct_blocks:,} distinct blocks of {trace.block_tokens}",
        f"{shape.workers:,} workers with {shape.cache_blocks:,} blocks each, {shape.replicas} placement"
        f"{'' if shape.replicas == 1 else 's'}; attainable: {study.attainable_rate:.1%} of prompt tokens",
    ]


def table(study: Study) -> list[str]:
    rows = [[cell(result.figures) for cell in COLUMNS.values()] for result in study.results]
    lines = align([list(COLUMNS), *rows])
    changed = [result.figures for result in study.results if result.figures.moved_per_change is not None]
    returns = [one.figures for one in study.results if one.figures.return_ttft_p50_s is not None]
    for one in returns:
        saved = "" if not one.pauses_saved_s else f", {seconds(one.pauses_saved_s)} of restoring done in pauses"
        wait = seconds(one.return_ttft_p50_s or 0.0)
        lines.append(f"{one.policy}: TTFT p50 of turns that come back from a tool {wait}{saved}")
    if changed:
        shares = ", ".join(f"{one.policy} {one.moved_per_change:.1%}" for one in changed)
        lines += ["", f"sessions moved by each change of the fleet (1/N is {1 / study.shape.workers:.1%}): {shares}"]
    return lines


def loads_table(study: Study) -> list[str]:
    loads = list(dict.fromkeys(load for load, _ in study.at_loads))
    policies = list(dict.fromkeys(one.policy for _, one in study.at_loads))
    found = {(one.policy, load): one for load, one in study.at_loads}
    rows = [("policy", *(f"at {load:g}" for load in loads))]
    rows += [(_name(name), *(f"{found[name, load].goodput_per_s:.2f}" for load in loads)) for name in policies]
    return [f"requests/s with a first token within {study.slo_s:g} s, by share of capacity:", "", *align(rows)]


def autoscale_table(study: Study) -> list[str]:
    """Against the fixed fleet of the first policy that was run."""
    fixed = study.results[0].figures
    rows: list[tuple[str, ...]] = [
        ("fleet", "worker-hours", "TTFT p50", "p99", "in target", "hits", "up", "down", "lost to scale-down"),
        ("fixed", *_scaled_cells(study.autoscaled[0].fixed_worker_hours, fixed, _fixed_held(study)), "", "", ""),
    ]
    for one in study.autoscaled:
        cells = _scaled_cells(one.worker_hours, one.figures, one.ttft_held)
        ups, downs, lost = one.scaling.ups, len(one.scaling.downs), one.scaling.lost_tokens
        rows.append((f"autoscaled, {one.victim} goes", *cells, f"{ups}", f"{downs}", f"{lost:,} tokens"))
    told = [f"{one.victim} goes, ready workers: {_changes(one)}" for one in study.autoscaled]
    return [f"a first token within {study.target_ttft_s:g} s is the target:", "", *align(rows), "", *told]


def _scaled_cells(hours: float, one: Figures, ttft_held: float) -> tuple[str, ...]:
    waits = (f"{wait:.2f} s" if math.isfinite(wait) else "never" for wait in (one.ttft_p50_s, one.ttft_p99_s))
    return f"{hours:.2f}", *waits, f"{ttft_held:.1%}", f"{one.hit_rate:.1%}"


def _changes(one: Autoscaled) -> str:
    said, last = [], None
    for moment in one.scaling.timeline:
        if moment.ready != last:
            said.append(f"{moment.ready} at {int(moment.at_s // 60)}:{int(moment.at_s % 60):02d}")
            last = moment.ready
    return ", ".join(said)


def _fixed_held(study: Study) -> float:
    return held(study.results[0].run, study.target_ttft_s)


def as_values(study: Study) -> dict[str, Any]:
    """For JSON, with null for infinity."""
    trace, shape = study.trace, study.shape
    values: dict[str, Any] = {
        "default": DEFAULT_POLICY,
        "policies": [_values(result.figures) for result in study.results],
        "loads": [{"load": load, **_values(one)} for load, one in study.at_loads],
        "requests": len(trace.arrivals),
        **{name: getattr(trace, name) for name in ("duration_s", "prompt_tokens", "distinct_blocks", "block_tokens")},
        "attainable_hit_rate": study.attainable_rate,
        "load": study.load,
        **{name: getattr(shape, name) for name in ("workers", "cache_blocks", "replicas", "seed")},
        "slo_ttft_s": study.slo_s,
    }
    if study.autoscaled:
        values["target_ttft_s"] = study.target_ttft_s
        values["fixed_ttft_held"] = _fixed_held(study)
        values["autoscaled"] = [_autoscaled_values(one) for one in study.autoscaled]
    return values


def _autoscaled_values(one: Autoscaled) -> dict[str, Any]:
    moments = one.by_minute()
    return {
        **_values(one.figures),
        "scale_down": one.victim,
        **{name: getattr(one, name) for name in ("worker_hours", "fixed_worker_hours", "ttft_held")},
        "scale_ups": one.scaling.ups,
        "scale_downs": len(one.scaling.downs),
        "lost_blocks": one.scaling.lost_blocks,
        "lost_tokens": one.scaling.lost_tokens,
        "most_workers": max(moment.ready for moment in one.scaling.timeline),
        "replicas_by_minute": [moment.ready for moment in moments],
        "desired_by_minute": [moment.desired for moment in moments],
    }


def _values(figures: Figures) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(figures).items()
    }


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
