"""Figures of a run, from its records. Pure.

Percentiles are interpolated between neighbours, as numpy's are by default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvfleet.cli.bench.request_record import RequestRecord


@dataclass(frozen=True)
class BenchTargets:
    """In seconds; None: any time is good enough."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def __bool__(self) -> bool:
        return (self.ttft_s, self.itl_s, self.e2e_s) != (None, None, None)

    def are_met(self, record: RequestRecord) -> bool:
        pairs = ((record.ttft_s, self.ttft_s), (record.itl_s or 0.0, self.itl_s), (record.e2e_s, self.e2e_s))
        return not record.error and all(target is None or value <= target for value, target in pairs)


@dataclass(frozen=True)
class Percentiles:
    p50: float | None = None  # None: nothing was measured
    p90: float | None = None
    p99: float | None = None
    mean: float | None = None


def percentile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def percentiles(values: Iterable[float]) -> Percentiles:
    ordered = sorted(values)
    if not ordered:
        return Percentiles()
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99, sum(ordered) / len(ordered))


@dataclass(frozen=True)
class RunFigures:
    """`requests` ended, of which `errors` failed; every time and rate is of those that did not."""

    requests: int
    errors: int
    errors_by_kind: dict[str, int]
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    output_tokens: int
    prompt_tokens: int | None
    cached_share: float | None  # of prompt tokens, of requests whose server tells both
    ttft_s: Percentiles
    itl_s: Percentiles  # each time between two events with text
    tpot_s: Percentiles  # each request's mean time per token after the first
    e2e_s: Percentiles
    late_s: Percentiles
    goodput: float | None  # share of all requests; None without targets
    goodput_per_s: float | None


def figures_of(records: Sequence[RequestRecord], duration_s: float, targets: BenchTargets) -> RunFigures:
    whole = [record for record in records if not record.error]
    told = [(record.prompt_tokens, record.cached_tokens) for record in whole]
    known = [(prompt, cached) for prompt, cached in told if prompt is not None and cached is not None]
    prompts = [prompt for prompt, _ in told if prompt is not None]
    output = sum(record.output_tokens for record in whole)
    good = sum(targets.are_met(record) for record in records) if targets else None
    span = duration_s or 1e-9
    return RunFigures(
        requests=len(records),
        errors=len(records) - len(whole),
        errors_by_kind=dict(Counter(record.error for record in records if record.error).most_common()),
        duration_s=duration_s,
        requests_per_s=len(whole) / span,
        tokens_per_s=output / span,
        output_tokens=output,
        prompt_tokens=sum(prompts) if prompts else None,
        cached_share=cached_share(known),
        ttft_s=percentiles(record.ttft_s for record in whole),
        itl_s=percentiles(chain.from_iterable(record.gaps_s for record in whole)),
        tpot_s=percentiles(itl for record in whole if (itl := record.itl_s) is not None),
        e2e_s=percentiles(record.e2e_s for record in whole),
        late_s=percentiles(record.late_s for record in records),
        goodput=None if good is None or not records else good / len(records),
        goodput_per_s=None if good is None else good / span,
    )


def cached_share(known: Sequence[tuple[int, int]]) -> float | None:
    prompt = sum(prompt for prompt, _ in known)
    return sum(cached for _, cached in known) / prompt if prompt else None


def as_json(figures: RunFigures) -> dict[str, Any]:
    """Times and rates to six digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, Percentiles):
            return {name: rounded(one) for name, one in vars(value).items()}
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return {name: rounded(value) for name, value in vars(figures).items()}
