"""What an ingress counts, as Prometheus reads it. Hot paths add to plain integers; a collector shows them when asked.

Every series exists from the start at 0: a rate over a series that appears with its first event misses that event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

GENERATING = ("chat_completions", "completions", "generate")
ROUTES = (
    *GENERATING,
    "models",
    "stats",
    "workers",
    "kv_route",
    "session_get",
    "session_kv",
    "session_delete",
    "placements",
    "health",
    "metrics",
    "openapi",
    "other",
)
CODES = ("200", "204", "400", "401", "403", "404", "405", "409", "413", "422", "429", "499", "500", "501", "503", "504")
_TTFT_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(slots=True)
class Tally:
    """Counted on hot paths, since the start of the process."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    spliced_tokens: int = 0
    session_turns: int = 0
    active_streams: int = 0
    stream_errors: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that lives elsewhere and is read when Prometheus asks. `kind` is `counter` or `gauge`."""

    name: str
    help: str
    kind: str
    read: Callable[[], float]


class _Readings(Collector):
    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = tuple(readings)

    def collect(self) -> Iterable[Metric]:
        for one in self._readings:
            kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
            yield kind(f"kvfleet_ingress_{one.name}", one.help, value=one.read())

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not read what is not there yet


class IngressMetrics:
    """All series of one ingress, registered in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.tally = Tally()
        self.requests = Counter(
            "kvfleet_ingress_requests_total",
            "Requests by route and HTTP status (499: the client left).",
            ["route", "code"],
            registry=registry,
        )
        self.ttft = Histogram(
            "kvfleet_ingress_ttft_seconds",
            "From the request's arrival to its first token.",
            ["route"],
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.itl = Histogram(
            "kvfleet_ingress_inter_token_seconds",
            "Mean time between the tokens of one request.",
            ["route"],
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        for route in ROUTES:
            for code in CODES:
                self.requests.labels(route, code)
        for route in GENERATING:
            self.ttft.labels(route)
            self.itl.labels(route)

    def read_also(self, readings: Iterable[Reading]) -> None:
        """Add the tally and values that other parts own. Call once."""
        tally = self.tally
        own = (
            Reading("prompt_tokens", "Prompt tokens of finished requests.", "counter", lambda: tally.prompt_tokens),
            Reading("generated_tokens", "Tokens relayed to clients.", "counter", lambda: tally.generated_tokens),
            Reading("cached_tokens", "Prompt tokens found cached.", "counter", lambda: tally.cached_tokens),
            Reading(
                "spliced_tokens", "Prompt tokens taken from chat history.", "counter", lambda: tally.spliced_tokens
            ),
            Reading("session_turns", "Turns committed to sessions.", "counter", lambda: tally.session_turns),
            Reading("stream_errors", "Streams that ended with an error event.", "counter", lambda: tally.stream_errors),
            Reading("active_streams", "Generations running now.", "gauge", lambda: tally.active_streams),
        )
        self.registry.register(_Readings((*own, *readings)))
