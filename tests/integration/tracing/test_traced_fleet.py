"""Traces of a real fleet, as a collector gets them. Tests run in their order: later ones kill, drain, and end it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterable
from typing import Any

import httpx
import nats
import pytest

from tests.integration.tracing.collector import Collector, SeenSpan
from tests.integration.tracing.conftest import Caller
from tests.support import sse
from tests.support.up import Up, command_of
from tests.support.waiting import LIMIT_S, wait_until

SERVICES = {"kvfleet-ingress", "kvfleet-placement", "kvfleet-worker", "kvfleet-vault"}
LONG = "a long prompt " * 250
SECRET = "nobody may read this"


def post(fleet: Up, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    answer = httpx.post(f"{fleet.base}/v1/completions", json={"model": "demo"} | body, headers=headers, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    return answer


def at(worker: str) -> dict[str, str]:
    return {"policy": "direct", "worker": worker}


def is_below(child: SeenSpan, parent: SeenSpan) -> bool:
    """And within it, as far as two processes' clocks of one machine tell."""
    slack = 5_000_000
    return child.parent == parent.id and parent.began - slack <= child.began <= child.ended <= parent.ended + slack


def tell_of(spans: Iterable[SeenSpan]) -> str:
    return json.dumps([[one.name, one.attributes, one.events, one.resource] for one in spans])


def pid_of(fleet: Up, member: str) -> int:
    for pid in fleet.descendants():
        if f"--id={member}" in command_of(pid).split(" "):
            return pid
    raise AssertionError(f"no process of {member}")


def until_ready(fleet: Up, *workers: str) -> None:
    def are_ready() -> bool:
        listed = httpx.get(f"{fleet.base}/workers").json()
        return all(listed.get(worker, {}).get("state") == "ready" for worker in workers)

    wait_until(are_ready, told=lambda: httpx.get(f"{fleet.base}/workers").text, pause_s=0.1)


def test_one_request_is_one_trace_across_services(traced_fleet: Up, collector: Collector, caller: Caller) -> None:
    body = {"prompt": f"{SECRET} {LONG}", "max_tokens": 12, "ignore_eos": True} | at("w0")
    answer = post(traced_fleet, body, caller.headers | {"x-request-id": "callers-own"})
    spans = collector.trace(
        caller.trace,
        *("POST /v1/completions", "tokenise", "stream", "place", "decide", "attempt", "generate", "queue", "prefill"),
        "decode",
    )
    assert answer.headers["x-trace-id"] == caller.trace
    assert {span.service for found in spans.values() for span in found} >= SERVICES - {"kvfleet-vault"}
    one = {name: found[0] for name, found in spans.items()}
    assert all(len(found) == 1 for found in spans.values()), spans.keys()
    server = one["POST /v1/completions"]
    assert (server.parent, server.kind, server.failed) == (caller.span, "server", False)
    for child, parent in (
        ("tokenise", "POST /v1/completions"), ("stream", "POST /v1/completions"), ("place", "stream"),
        ("decide", "place"), ("attempt", "stream"), ("generate", "attempt"), ("queue", "generate"),
        ("prefill", "generate"), ("decode", "generate"),
    ):  # fmt: skip
        assert is_below(one[child], one[parent]), (child, parent)
    for late in ("look", "vault has"):  # a busy machine may not wait for its vault
        one.pop(late, None)
    assert {name: span.kind for name, span in one.items() if span.kind != "internal"} == {
        "POST /v1/completions": "server", "place": "client", "decide": "server", "attempt": "client",
        "generate": "server",
    }  # fmt: skip

    said = answer.json()
    prompt_tokens = said["usage"]["prompt_tokens"]
    expected = {
        "http.route": "/v1/completions", "http.request.method": "POST", "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion", "gen_ai.request.model": "demo", "gen_ai.request.max_tokens": 12,
        "gen_ai.usage.input_tokens": prompt_tokens, "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ["length"], "kvfleet.tenant": "public",
        "kvfleet.request.id": answer.headers["x-kvfleet-request-id"], "kvfleet.request.callers_id": "callers-own",
    }  # fmt: skip
    assert server.attributes.items() >= expected.items()
    assert one["stream"].events["first_token"]["gen_ai.response.time_to_first_chunk"] > 0
    decided = one["decide"].attributes
    assert (decided["kvfleet.worker.id"], decided["kvfleet.placement.policy"]) == ("w0", "direct")
    assert decided["kvfleet.placement.candidates"] == 2
    generated = one["generate"].attributes
    assert (generated["kvfleet.worker.id"], generated["kvfleet.attempt"]) == ("w0", 0)
    assert generated["gen_ai.usage.output_tokens"] == 12
    assert one["prefill"].attributes["kvfleet.prefill.tokens"] == prompt_tokens
    assert one["prefill"].attributes["kvfleet.prefill.chunks"] >= 1
    assert one["decode"].attributes["kvfleet.decode.steps"] == 11
    assert SECRET not in tell_of(span for found in spans.values() for span in found)


@pytest.mark.parametrize("given", ["garbage", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "unsampled", None])
def test_what_is_not_sampled_leaves_no_span(
    traced_fleet: Up, collector: Collector, caller: Caller, given: str | None
) -> None:
    """The fleet's own ratio is 0: no root is begun."""
    before = len(collector.spans)
    if given == "unsampled":
        given = caller.headers["traceparent"][:-1] + "0"
    answer = post(traced_fleet, {"prompt": "x", "max_tokens": 2}, {"traceparent": given} if given is not None else None)
    assert "x-trace-id" not in answer.headers
    time.sleep(0.2)  # nothing is told
    assert len(collector.spans) == before


def test_a_refusal_is_told_and_is_no_fault_of_the_server(
    traced_fleet: Up, collector: Collector, caller: Caller
) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": -1}
    answer = httpx.post(f"{traced_fleet.base}/v1/completions", json=body, headers=caller.headers)
    (server,) = collector.trace(caller.trace, "POST /v1/completions")["POST /v1/completions"]
    assert (answer.status_code, server.attributes["http.response.status_code"]) == (400, 400)
    assert server.attributes["error.type"] == answer.json()["error"]["code"]
    assert not server.failed


def test_a_repeat_has_a_trace_of_its_own_that_names_the_first(traced_fleet: Up, collector: Collector) -> None:
    first, again = Caller(), Caller()
    for caller in (first, again):
        headers = caller.headers | {"Idempotency-Key": first.trace}
        post(traced_fleet, {"prompt": "once", "max_tokens": 2}, headers)
    (begun,) = collector.trace(first.trace, "POST /v1/completions")["POST /v1/completions"]
    spans = collector.trace(again.trace, "POST /v1/completions")
    assert set(spans) == {"POST /v1/completions"}, "nothing was generated for it"
    assert spans["POST /v1/completions"][0].links == (begun.id,)


async def ask_bare(fleet: Up, body: dict[str, Any], headers: dict[str, str]) -> list[dict[str, Any]]:
    connection = await nats.connect(fleet.nats_url)
    frames: list[dict[str, Any]] = []
    done = asyncio.Event()

    async def on_frame(message: Any) -> None:
        frames.append(json.loads(message.data))
        if frames[-1]["type"] in ("finished", "failed"):
            done.set()

    inbox = connection.new_inbox()
    await connection.subscribe(inbox, cb=on_frame)
    headers = {"Content-Type": "application/json"} | headers
    await connection.publish("kvf.generate.public.demo", json.dumps(body).encode(), reply=inbox, headers=headers)
    await asyncio.wait_for(done.wait(), LIMIT_S)
    await connection.close()
    return frames


@pytest.mark.parametrize("by", ["header", "body"])
async def test_a_bare_producers_trace_goes_on(traced_fleet: Up, collector: Collector, caller: Caller, by: str) -> None:
    body: dict[str, Any] = {"prompt": "from NATS alone", "max_tokens": 3, "ignore_eos": True}
    headers = {"Traceparent": caller.headers["traceparent"]} if by == "header" else {}
    frames = await ask_bare(traced_fleet, body | ({} if by == "header" else caller.headers), headers)
    assert frames[-1]["type"] == "finished"
    spans = await asyncio.to_thread(collector.trace, caller.trace, "forward", "decide", "generate", "decode")
    forward, decide, generate = spans["forward"][0], spans["decide"][0], spans["generate"][0]
    assert (forward.parent, forward.kind, forward.service) == (caller.span, "consumer", "kvfleet-placement")
    assert (decide.parent, generate.parent) == (forward.id, decide.id)
    assert decide.attributes["kvfleet.worker.id"] == generate.instance
    assert decide.attributes["kvfleet.placement.candidates"] == 2


def stream_and_signal(
    fleet: Up, body: dict[str, Any], headers: dict[str, str], worker: str, number: signal.Signals
) -> None:
    """A stream to its end; the worker gets the signal after ten events."""
    events = 0
    with httpx.stream("POST", f"{fleet.base}/v1/completions", json=body, headers=headers, timeout=LIMIT_S) as answer:
        for line in sse.lines(answer):
            events += line.startswith("data: ")
            if events == 10 and line.startswith("data: "):
                os.kill(pid_of(fleet, worker), number)


def test_a_killed_worker_is_two_attempts_in_one_trace(traced_fleet: Up, collector: Collector, caller: Caller) -> None:
    body = {"model": "demo", "prompt": "go on", "max_tokens": 150, "ignore_eos": True, "stream": True} | at("w0")
    stream_and_signal(traced_fleet, body, caller.headers, "w0", signal.SIGKILL)
    spans = collector.trace(caller.trace, "POST /v1/completions", "attempt", "attempt", "place", "place", "generate")
    lost, went_on = spans["attempt"]
    (stream,) = spans["stream"]
    assert (lost.failed, lost.attributes["error.type"], lost.attributes["kvfleet.worker.id"]) == (
        True, "worker_lost", "w0",
    )  # fmt: skip
    assert (went_on.failed, went_on.attributes["kvfleet.worker.id"]) == (False, "w1")
    assert went_on.links == (lost.id,)
    assert {lost.parent, went_on.parent, *(place.parent for place in spans["place"])} == {stream.id}
    assert stream.events["attempt_failed"] == {"error.type": "worker_lost"}
    assert not stream.failed
    (generate,) = spans["generate"]
    assert (generate.parent, generate.instance) == (went_on.id, "w1")
    assert generate.attributes["gen_ai.usage.output_tokens"] == 150
    assert generate.attributes["kvfleet.recomputed_tokens"] > 0
    assert spans["POST /v1/completions"][0].attributes["gen_ai.usage.output_tokens"] == 150


def test_log_lines_of_a_traced_request_name_its_trace(traced_fleet: Up) -> None:
    """The attempt that the killed worker lost was worth a line."""
    lines = [json.loads(line) for line in traced_fleet.stderr_lines if line.startswith("{")]
    ended = [line for line in lines if re.match(r"request \w+: attempt \d+ at w0 ended", line["message"])]
    assert ended
    assert all(re.fullmatch(r"[0-9a-f]{32}", line["trace_id"]) for line in ended)
    assert all(re.fullmatch(r"[0-9a-f]{16}", line["span_id"]) for line in ended)
    assert not any("trace_id" in line for line in lines if " is ready" in line["message"])


def test_a_drained_worker_hands_over_within_the_trace(traced_fleet: Up, collector: Collector, caller: Caller) -> None:
    """And what it recorded leaves before it does."""
    until_ready(traced_fleet, "w0", "w1")
    body = {"model": "demo", "prompt": f"{SECRET} {LONG}", "max_tokens": 600, "ignore_eos": True, "stream": True} | at(
        "w1"
    )
    stream_and_signal(traced_fleet, body, caller.headers, "w1", signal.SIGTERM)
    spans = collector.trace(
        caller.trace,
        "POST /v1/completions",
        *["attempt", "generate"] * 2,
        "hand_over",
        "vault has",
        "peer has",
        "restore",
        "fetch",
        "peer get",
    )
    left, went_on = spans["attempt"]
    assert "moved" in left.events
    assert not left.failed
    assert (left.attributes["kvfleet.worker.id"], went_on.attributes["kvfleet.worker.id"]) == ("w1", "w0")
    first, second = spans["generate"]
    assert (first.parent, second.parent) == (left.id, went_on.id)
    (hand_over,) = spans["hand_over"]
    assert is_below(hand_over, first)
    assert hand_over.attributes == {"kvfleet.hand_over.moved": True}
    assert second.attributes["kvfleet.handed_over"]
    # What is handed over is looked for everywhere, with patience, and brought whatever computing it would cost.
    looks = {span.attributes["kvfleet.tier"]: span for span in spans["look"] if span.parent == second.id}
    assert [one.parent for one in spans["vault has"] if one.attributes["kvfleet.client.id"] == "w0"] == [
        looks["vault"].id
    ]
    assert [one.parent for one in spans["peer has"]] == [looks["peer"].id]
    restore, fetch, served = spans["restore"][-1], spans["fetch"][-1], spans["peer get"][-1]
    assert is_below(restore, second)
    assert (fetch.parent, served.parent) == (second.id, fetch.id)
    assert (fetch.instance, served.instance) == ("w0", "w1")
    blocks = restore.attributes["kvfleet.blocks.hit"]
    assert blocks > 0
    assert restore.attributes["kvfleet.tier"] == served.attributes["kvfleet.tier"] == "peer"
    assert served.attributes["kvfleet.blocks.hit"] == fetch.attributes["kvfleet.blocks.hit"] == blocks
    assert served.attributes["kvfleet.bytes"] == restore.attributes["kvfleet.bytes"] > 0
    assert {span.service for found in spans.values() for span in found} == SERVICES
    assert SECRET not in tell_of(span for found in spans.values() for span in found)


def test_without_its_collector_the_fleet_serves_and_ends_as_ever(
    traced_fleet: Up, collector: Collector, caller: Caller
) -> None:
    collector.close()
    for _ in range(5):
        post(traced_fleet, {"prompt": "still there", "max_tokens": 2}, caller.headers)
    time.sleep(0.5)
    post(traced_fleet, {"prompt": "still there", "max_tokens": 2}, caller.headers)
    began = time.monotonic()
    assert traced_fleet.stop() == 0
    assert time.monotonic() - began < 10
    assert "Traceback" not in traced_fleet.stderr
    lost = [line for line in traced_fleet.stderr_lines if "spans are lost" in line]
    services = {json.loads(line)["service"] for line in lost}
    assert len(lost) == len(services), "one line a minute and process"
