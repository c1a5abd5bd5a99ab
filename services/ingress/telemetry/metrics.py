"""The metrics of an ingress. Hot paths add to plain integers, which a collector reads. Every series exists from the
start at 0: a rate over a series that appears with its first event misses that event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial

from prometheus_client import CollectorRegistry, Counter, ProcessCollector

from kvfleet.ingress.limits.service_levels import ServiceLevels, Targets
from kvproto import errors
from kvproto.messages import FinishReason
from kvservice.metrics import Buckets, LiveCollector, Reading

GENERATING = ("chat_completions", "completions", "generate", "messages", "responses")
ROUTES = (
    *GENERATING, "models", "stats", "workers", "kv_route", "session_get", "session_kv", "session_delete",
    "response_get", "response_cancel", "response_delete", "placements", "newest_placements", "health", "metrics",
    "openapi", "dashboard", "other",
)  # fmt: skip
CODES = ("200", "204", "400", "401", "403", "404", "405", "409", "413", "422", "429", "499", "500", "501", "503", "504")
OUTCOMES = (*(reason.value for reason in FinishReason), *sorted(errors.BY_CODE))
_BY_LEVEL = ("model", "route")


def _counted(help_: str) -> int:
    number: int = field(default=0, metadata={"help": help_})
    return number


@dataclass(slots=True)
class RequestTally:
    """Since the start of the process."""

    prompt_tokens_total: int = _counted("Prompt tokens of finished requests.")
    generated_tokens_total: int = _counted("Tokens relayed to clients.")
    cached_tokens_total: int = _counted("Prompt tokens found cached.")
    spliced_tokens_total: int = _counted("Prompt tokens taken from chat history.")
    stream_errors_total: int = _counted("Streams that ended with an error event.")
    active_streams: int = _counted("Generations running now.")


class IngressMetrics:
    """All series of one ingress, in one registry. `served` names the models of workers."""

    def __init__(
        self, registry: CollectorRegistry, targets: Targets = Targets(), served: Callable[[], Iterable[str]] = tuple
    ) -> None:
        self.registry = registry
        self.tally = RequestTally()
        self.levels = ServiceLevels(targets, GENERATING, served)
        self.requests = Counter(
            "kvfleet_ingress_requests_total",
            "Requests by route and HTTP status (499: the client left).",
            ["route", "code"],
            registry=registry,
        )
        for route in ROUTES:
            for code in CODES:
                self.requests.labels(route, code)
        self._outcomes = {route: dict.fromkeys(OUTCOMES, 0) for route in GENERATING}
        registry.register(LiveCollector([*self._tally_readings(), *self._level_readings()]))
        ProcessCollector(registry=registry)

    def ended(self, route: str, outcome: str) -> None:
        counts = self._outcomes.get(route)
        if counts is not None:
            counts[outcome] = counts.get(outcome, 0) + 1

    def _tally_readings(self) -> Iterator[Reading]:
        for one in fields(RequestTally):
            read = partial(getattr, self.tally, one.name)
            yield Reading(f"kvfleet_ingress_{one.name}", one.metadata["help"], read)

    def _level_readings(self) -> list[Reading]:
        levels, targets = self.levels, self.levels.targets

        def count(name: str, help_: str, attribute: str) -> Reading:
            def read() -> dict[tuple[str, ...], float]:
                return {by: getattr(level, attribute) for by, level in levels.all().items()}

            return Reading(f"kvfleet_ingress_{name}", help_, labels=_BY_LEVEL, read_labelled=read)

        def histogram(name: str, help_: str, attribute: str) -> Reading:
            def read() -> dict[tuple[str, ...], tuple[Buckets, float]]:
                return {by: getattr(level, attribute).read() for by, level in levels.all().items()}

            return Reading(f"kvfleet_ingress_{name}", help_, labels=_BY_LEVEL, read_histograms=read)

        def outcomes() -> dict[tuple[str, ...], float]:
            return {(route, why): n for route, counts in self._outcomes.items() for why, n in counts.items()}

        def missed() -> dict[tuple[str, ...], float]:
            found: dict[tuple[str, ...], float] = {}
            for by, level in levels.all().items():
                found |= {(*by, "ttft"): level.missed_ttft, (*by, "itl"): level.missed_itl}
            return found

        return [
            histogram("ttft_seconds", "From a request's arrival to its first token.", "ttft"),
            histogram("inter_token_seconds", "From one token of a request to the next.", "itl"),
            Reading(
                "kvfleet_ingress_outcomes_total",
                "Generating requests by what ended them: a finish reason or an error's code.",
                labels=("route", "outcome"),
                read_labelled=outcomes,
            ),
            count(
                "judged_requests_total", "Requests that finished, or failed through no fault of their caller.", "judged"
            ),
            count("goodput_requests_total", "Of the judged, those that finished within both targets.", "good_requests"),
            count("goodput_tokens_total", "Tokens generated for these.", "good_tokens"),
            Reading(
                "kvfleet_ingress_slo_missed_requests_total",
                "Of the judged, those that missed a target; some miss both.",
                labels=(*_BY_LEVEL, "target"),
                read_labelled=missed,
            ),
            Reading("kvfleet_ingress_slo_ttft_seconds", "Target of the TTFT.", lambda: targets.ttft_s),
            Reading("kvfleet_ingress_slo_itl_seconds", "Target of the mean ITL.", lambda: targets.itl_s),
        ]
