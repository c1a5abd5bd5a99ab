"""Tracing as services see it, and the adapter behind it, with spans kept in memory."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import StatusCode

from kvproto.errors import InvalidRequest
from kvproto.trace_context import parse
from kvservice import tracing
from kvservice.lifecycle import Lifecycle
from kvservice.logs import JsonFormatter
from kvservice.settings import ServiceSettings
from kvservice.tracing import NULL, unix_ns, within, work_for
from kvservice.tracing_otel import OtelTracer
from kvservice.tracing_start import endpoint_of, open_tracer
from tests.support.kept_spans import Kept
from tests.support.waiting import LIMIT_S

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = PARENT[:-1] + "0"
OTEL = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME",
        "OTEL_RESOURCE_ATTRIBUTES")  # fmt: skip


class Rig:
    def __init__(self, exporter: SpanExporter | None = None, **options: Any) -> None:
        self.kept = Kept()
        self.tracer = OtelTracer(service="kvfleet-x", instance="x1", exporter=exporter or self.kept, **options)

    def spans(self) -> dict[str, ReadableSpan]:
        """All that ended; nothing can be recorded afterwards."""
        self.tracer.close(2.0)
        return {span.name: span for span in self.kept.spans}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTEL:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.tracer.close(1.0)


def test_without_a_tracer_nothing_is_recorded_and_nothing_fails() -> None:
    assert NULL.begin("x", PARENT, root=True) is None
    assert not NULL.enabled
    NULL.close(0.0)


def test_a_sampled_parent_is_followed_and_an_unsampled_one_too(rig: Rig) -> None:
    span = rig.tracer.begin("mine", PARENT, {"a": 1}, kind="server")
    assert span is not None
    span.end()
    for nothing in (UNSAMPLED, None, "garbage", "00-0-0-01"):
        assert rig.tracer.begin("not mine", nothing) is None, nothing
    assert rig.tracer.begin("not mine", UNSAMPLED, root=True) is None, "its root was not sampled: nor is it"
    (found,) = rig.spans().values()
    assert found.context.trace_id == int(PARENT[3:35], 16)
    assert found.parent is not None
    assert found.parent.span_id == int(PARENT[36:52], 16)
    assert found.attributes == {"a": 1}
    assert found.kind.name == "SERVER"


def test_roots_are_begun_where_that_is_allowed_and_as_often_as_it_is_set() -> None:
    always, never = Rig(sample_ratio=1.0), Rig(sample_ratio=0.0)
    begun = always.tracer.begin("root", None, root=True)
    assert begun is not None
    context = parse(begun.traceparent)
    assert context is not None
    assert context.sampled
    begun.end()
    assert always.tracer.begin("root", "garbage", root=True) is not None, "as if there were none"
    assert always.spans()["root"].parent is None
    assert never.tracer.begin("root", None, root=True) is None
    assert never.tracer.begin("child", PARENT, root=True) is not None, "the ratio is of roots"
    some = Rig(sample_ratio=0.5)
    begun_of_many = sum(some.tracer.begin("root", None, root=True) is not None for _ in range(400))
    assert 120 < begun_of_many < 280
    for one in (never, some):
        one.tracer.close(1.0)


def test_children_events_links_errors_and_times(rig: Rig) -> None:
    root = rig.tracer.begin("root", None, root=True, at=1_000)
    assert root is not None
    child = root.child("child", {"n": 1}, kind="client", at=2_000)
    child.event("seen", {"b": "c"}, at=2_500)
    child.link(PARENT)
    child.link("garbage")
    child.link(None)
    child.set({"n": 2})
    child.end(error="worker_lost", at=3_000)
    child.end(at=9_000)
    root.end(at=4_000)
    found = rig.spans()
    seen, above = found["child"], found["root"]
    assert (seen.start_time, seen.end_time, above.start_time, above.end_time) == (2_000, 3_000, 1_000, 4_000)
    assert seen.parent is not None
    assert seen.parent.span_id == above.context.span_id == int(root.ids.span_id, 16)
    assert seen.attributes == {"n": 2, "error.type": "worker_lost"}
    assert seen.status.status_code is StatusCode.ERROR
    assert above.status.status_code is StatusCode.UNSET
    assert [(event.name, event.timestamp, dict(event.attributes or {})) for event in seen.events] == [
        ("seen", 2_500, {"b": "c"})
    ]
    assert [link.context.span_id for link in seen.links] == [int(PARENT[36:52], 16)]


def test_long_values_are_cut(rig: Rig) -> None:
    span = rig.tracer.begin("x", None, {"long": "x" * 5000}, root=True)
    assert span is not None
    span.end()
    assert len(str(rig.spans()["x"].attributes["long"])) == 512  # type: ignore[index]


def test_the_resource_is_the_process_and_what_the_standard_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Rig().tracer._provider.resource.attributes
    assert (own["service.name"], own["service.instance.id"]) == ("kvfleet-x", "x1")
    assert own["telemetry.sdk.language"] == "python"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod,service.version=3")
    said = Rig().tracer._provider.resource.attributes
    assert (said["service.name"], said["service.instance.id"]) == ("chat", "x1")
    assert (said["deployment.environment.name"], said["service.version"]) == ("prod", "3")


# ---------------------------------------------------------------------------------------------- trouble


def test_a_collector_that_fails_costs_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ConnectionError("nobody is there")

    rig = Rig(Kept(fail))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            span = rig.tracer.begin("x", None, root=True)
            assert span is not None
            span.end()
            rig.tracer._processor.force_flush()
    assert [record.getMessage() for record in caplog.records] == ["1 spans are lost: ConnectionError"]
    assert rig.tracer._quiet.lost_total == 3
    began = time.monotonic()
    rig.tracer.close(5.0)
    assert time.monotonic() - began < 3.0


def test_a_collector_that_hangs_holds_up_nobody_and_memory_is_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    over = time.monotonic() + 12.0
    stuck = Kept(lambda: time.sleep(max(0.0, over - time.monotonic())))
    rig = Rig(stuck)
    began = time.monotonic()
    with caplog.at_level(logging.INFO):
        for _ in range(500):
            span = rig.tracer.begin("x", None, root=True)
            assert span is not None
            span.end()
    assert time.monotonic() - began < 3.0
    assert len(rig.tracer._processor._batch_processor._queue) <= 64
    assert not caplog.records, "not a line for each of them"
    while not rig.tracer._quiet.seems_away:
        assert time.monotonic() < over
        time.sleep(0.01)
    began = time.monotonic()
    rig.tracer.close(6.0)
    assert time.monotonic() - began < 3.0, "who seems to be away is not waited for"


# ---------------------------------------------------------------------------------------------- wiring


def settings(**fields: Any) -> ServiceSettings:
    return ServiceSettings(id="x1", **fields)


def test_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint_of(settings()) is None
    assert open_tracer(settings(), "ingress", Lifecycle()) is NULL
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert endpoint_of(settings()) == "http://collector:4318"
    assert endpoint_of(settings(otlp_endpoint="http://mine:1")) == "http://mine:1"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert endpoint_of(settings(otlp_endpoint="http://mine:1")) is None
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    with pytest.raises(InvalidRequest, match="http:// or https://"):
        open_tracer(settings(otlp_endpoint="collector:4317"), "ingress", Lifecycle())


@pytest.mark.parametrize("base", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_the_endpoint_is_a_base_url(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = OtelTracer(service="s", instance="i", endpoint=base)
    assert tracer._quiet._exporter._endpoint == "http://c:4318/v1/traces"  # type: ignore[attr-defined]
    tracer.close(0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://env:4318")
    tracer = OtelTracer(service="s", instance="i")
    assert tracer._quiet._exporter._endpoint == "http://env:4318/v1/traces"  # type: ignore[attr-defined]
    tracer.close(0.1)


async def test_closing_exports_what_has_ended_before_the_process_does() -> None:
    life = Lifecycle()
    tracer = open_tracer(settings(otlp_endpoint="http://127.0.0.1:9"), "vault", life)
    assert isinstance(tracer, OtelTracer)
    kept = Kept()
    tracer._quiet._exporter = kept
    span = tracer.begin("last words", None, root=True)
    assert span is not None
    span.end()
    await life.close()
    assert [one.name for one in kept.spans] == ["last words"]


def test_no_endpoint_no_opentelemetry() -> None:
    """Not even imported, by any of the four services."""
    program = (
        "import sys, kvfleet.ingress.main, kvfleet.placement.main, kvfleet.vault.main\n"
        "import kvfleet.worker.main, kvfleet.worker.own_backend\n"
        "from kvservice.lifecycle import Lifecycle\n"
        "from kvservice.settings import ServiceSettings\n"
        "from kvservice.tracing import NULL\nfrom kvservice.tracing_start import open_tracer\n"
        "assert open_tracer(ServiceSettings(id='x'), 'ingress', Lifecycle()) is NULL\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------------------------------------- logs, names


def line() -> dict[str, Any]:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "hello"})
    found: dict[str, Any] = json.loads(JsonFormatter("s").format(record))
    return found


def test_log_lines_within_a_traced_request_name_it(rig: Rig) -> None:
    span = rig.tracer.begin("x", PARENT)
    assert span is not None
    assert "trace_id" not in line()
    with within(span):
        assert (line()["trace_id"], line()["span_id"]) == (PARENT[3:35], span.ids.span_id)
        with within(None):
            assert line()["trace_id"] == PARENT[3:35], "what is not traced changes nothing"
    assert "trace_id" not in line()


async def test_tasks_log_as_part_of_who_started_them(rig: Rig) -> None:
    async def one(traceparent: str | None) -> str | None:
        work_for(rig.tracer.begin("x", traceparent))
        seen = await asyncio.create_task(asyncio.to_thread(line))
        value = seen.get("trace_id")
        return None if value is None else str(value)

    other = PARENT.replace("4bf9", "1234")
    tasks = [asyncio.create_task(one(context)) for context in (PARENT, other, None)]
    assert await asyncio.gather(*tasks) == [PARENT[3:35], other[3:35], None]
    assert tracing.current() is None
    work_for(rig.tracer.begin("x", PARENT))
    work_for(None)
    assert tracing.current() is None, "a task that serves the next request"


def test_a_loops_clock_becomes_unix_time() -> None:
    assert abs(unix_ns(time.monotonic() - 5.0) - (time.time_ns() - 5_000_000_000)) < 50_000_000
