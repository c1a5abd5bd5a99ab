"""One fleet of processes for this folder, tracing to a collector of ours; it samples nothing by itself."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.integration.tracing.collector import Collector
from tests.support.up import Up


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def traced_fleet(collector: Collector) -> Iterator[Up]:
    """Two workers that generate by rule, a vault, a placement and an ingress."""
    flags = ("--runner", "fake", "--fake-tokens-per-s", "300", "--log-level", "info", "--otlp-endpoint", collector.url)
    env = {"OTEL_BSP_SCHEDULE_DELAY": "50", "KVFLEET_TRACE_SAMPLE_RATIO": "0", "KVFLEET_LOG_FORMAT": "json"}
    up = Up("--port", "0", *flags, env=env)
    try:
        yield up.wait_ready()
    finally:
        up.stop()


class Caller:
    """Somebody who traces: a new trace each."""

    def __init__(self) -> None:
        self.trace = secrets.token_hex(16)
        self.span = secrets.token_hex(8)

    @property
    def headers(self) -> dict[str, str]:
        return {"traceparent": f"00-{self.trace}-{self.span}-01"}


@pytest.fixture
def caller() -> Caller:
    return Caller()
