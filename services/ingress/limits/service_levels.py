"""Service levels by model and route: TTFT, gaps between tokens (ITL), goodput. Pure; owned by the event loop.

ITL       as this process reads them: of the tokens of one read of the stream the first (of each choice) waited
judged    requests that finished, or failed through no fault of their caller
goodput   judged requests that finished with a TTFT and a mean ITL within the targets; and their tokens
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvservice.distribution import Distribution

TTFT_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
ITL_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
MAX_MODELS = 32
OTHER = "other"  # all models beyond `MAX_MODELS`: labels must stay few


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_s: float = 2.0
    itl_s: float = 0.1


@dataclass(eq=False, slots=True)
class ServiceLevel:
    """Of one model on one route, since the start."""

    ttft: Distribution = field(default_factory=lambda: Distribution(TTFT_S))
    itl: Distribution = field(default_factory=lambda: Distribution(ITL_S))
    judged: int = 0
    missed_ttft: int = 0
    missed_itl: int = 0
    good_requests: int = 0
    good_tokens: int = 0

    def came(self, seconds: float | None, tokens: int, choices: int) -> None:
        """`tokens` of `choices` choices came at once, `seconds` after the ones before; None: the first ones."""
        itl = self.itl
        first = choices if choices < tokens else tokens
        if seconds is not None:  # as `observe` does: it would cost as much again to call it
            itl.counts[bisect_left(ITL_S, seconds)] += first
            itl.sum += seconds * first
        if tokens > first:
            itl.counts[0] += tokens - first

    def judge(
        self, targets: Targets, ttft_s: float | None, mean_itl_s: float | None, tokens: int, *, finished: bool
    ) -> None:
        """A request is over. `ttft_s` is None without a token, `mean_itl_s` without a second one."""
        late = ttft_s is None or ttft_s > targets.ttft_s
        slow = mean_itl_s is not None and mean_itl_s > targets.itl_s
        self.judged += 1
        self.missed_ttft += late
        self.missed_itl += slow
        if finished and not late and not slow:
            self.good_requests += 1
            self.good_tokens += tokens


@dataclass(eq=False, slots=True)
class ServiceLevels:
    """`served` names the models of workers: their series exist before their first request."""

    targets: Targets
    routes: Sequence[str]
    served: Callable[[], Iterable[str]]
    _known: dict[tuple[str, str], ServiceLevel] = field(default_factory=dict)

    def of(self, model: str, route: str) -> ServiceLevel:
        level = self._known.get((model, route))
        if level is None:
            if len(self._known) >= MAX_MODELS * len(self.routes):
                model = OTHER
            for each in self.routes:
                self._known.setdefault((model, each), ServiceLevel())
            level = self._known[model, route]
        return level

    def all(self) -> dict[tuple[str, ...], ServiceLevel]:
        for model in self.served():
            self.of(model, self.routes[0])
        return {by: level for by, level in self._known.items()}  # noqa: C416  its keys' type is wider
