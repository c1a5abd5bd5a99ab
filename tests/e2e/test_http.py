"""The fleet as HTTP clients see it: httpx, the real openai package, bad input, a killed worker."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support import sse
from tests.support.up import Up, alive
from tests.support.waiting import LIMIT_S, wait_until

# What a few tokens are worth is no wait: on a busy machine a rested worker computes them anew.
PINNED = {"policy": "direct", "worker": "w0"}


@pytest.fixture
def http(up: Up) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=up.base, timeout=LIMIT_S, trust_env=False) as client:
        yield client


@pytest.fixture
def ai(up: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        for line in sse.lines(response):
            if line.startswith("data: ") and line != "data: [DONE]":
                out.append(json.loads(line[6:]))
    return out


def test_the_ready_line_was_true(up: Up, http: httpx.Client) -> None:
    assert up.stdout_lines == [f"ready {up.base}"]
    wait_until(lambda: "curl -N" in up.stderr)
    workers = http.get("/workers").json()
    assert {worker["state"] for worker in workers.values()} == {"ready"}
    assert len(workers) == 2
    for worker in workers.values():
        assert {"address", "state", "model", "epoch", "pid", "host"} <= set(worker)


def test_openai_models_and_chat(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["demo"]
    assert ai.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        ai.models.retrieve("other")
    reply = ai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Who are you?"}], max_tokens=40, temperature=0
    )
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_openai_streaming_equals_not_streaming(ai: openai.OpenAI) -> None:
    asked: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Good morrow, cousin."}],
        "max_tokens": 30,
        "seed": 11,
        "temperature": 0.8,
        "extra_body": PINNED,
    }
    whole = ai.chat.completions.create(**asked)
    pieces = []
    usage = None
    for chunk in ai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens > 0, "the second time the prompt is cached"


def test_the_second_turn_of_a_chat_finds_its_history_cached(ai: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Tell me of the battle, soldier {time.time()}."}]
    asked: Any = {"model": "demo", "extra_body": PINNED}
    first = ai.chat.completions.create(messages=messages, max_tokens=60, temperature=0.9, seed=3, **asked)
    assert first.usage is not None
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = ai.chat.completions.create(messages=messages, max_tokens=20, temperature=0, **asked)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    history = first.usage.prompt_tokens + first.usage.completion_tokens
    # Cut off by length, the last generated token was never fed: its K and V do not exist yet.
    never_fed = first.choices[0].finish_reason == "length"
    assert second.usage.prompt_tokens_details.cached_tokens == history - never_fed


def test_completions(ai: openai.OpenAI) -> None:
    reply = ai.completions.create(model="demo", prompt="ROMEO:\nBut soft", max_tokens=12, temperature=0)
    streamed = "".join(
        chunk.choices[0].text
        for chunk in ai.completions.create(
            model="demo", prompt="ROMEO:\nBut soft", max_tokens=12, temperature=0, stream=True
        )
        if chunk.choices
    )
    assert reply.choices[0].text == streamed
    assert streamed


def test_openai_errors_are_typed(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        ai.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        ai.completions.create(model="demo", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"


def test_generate_session_continues_with_its_tokens_cached(http: httpx.Client) -> None:
    first = events(http, "/generate", {"prompt": "O Romeo,", "max_tokens": 6, "temperature": 0})
    assert [event["type"] for event in first] == ["start", *["token"] * 6, "done"]
    start, done = first[0], first[-1]
    assert set(start) == {"type", "seq_id", "prompt", "cached_tokens", "worker_id", "request_id"}
    assert done["generated_text"] == "O Romeo," + "".join(event["token"] for event in first[1:-1])
    tokens_before = done["usage"]["prompt_tokens"] + done["tokens_generated"]
    # Named, since so few tokens are not worth a wait: on a busy machine a rested worker computes them anew.
    there = {"policy": "direct", "worker": start["worker_id"]}
    second = events(
        http,
        "/generate",
        {"prompt": " wherefore", "seq_id": start["seq_id"], "max_tokens": 5, "temperature": 0, **there},
    )
    assert second[0]["cached_tokens"] == tokens_before - 1
    assert second[0]["worker_id"] == start["worker_id"]
    session = http.get(f"/sessions/{start['seq_id']}").json()
    assert session["tokens"] == second[-1]["usage"]["prompt_tokens"] + second[-1]["tokens_generated"]
    route = http.get(f"/kv/route/{start['seq_id']}").json()
    assert route["worker_id"] == start["worker_id"]
    kv = http.get(f"/sessions/{start['seq_id']}/kv", params={"layer": 0})
    assert kv.status_code == 200
    from safetensors.numpy import load

    tensors = load(kv.content)
    assert tensors["k"].shape == tensors["v"].shape
    assert tensors["k"].shape[0] >= tokens_before - 1
    assert http.delete(f"/sessions/{start['seq_id']}").status_code in (200, 204)
    assert http.get(f"/sessions/{start['seq_id']}").status_code == 404


def test_a_deleted_session_leaves_nothing_but_what_others_share(http: httpx.Client) -> None:
    shared = f"Messenger {time.time()}: my lord, the queen would speak with you, and presently."
    asked = {"max_tokens": 4, "temperature": 0, "exact": True}
    tails = (
        " And so she weeps, and sighs, and walks the hall alone.",
        " The battle is begun, and many brave men fall.",
    )
    counted = http.post("/v1/completions", json={"model": "demo", "prompt": shared + " ", "max_tokens": 1}).json()
    kept, gone = (events(http, "/generate", {"prompt": shared + tail, **asked})[0] for tail in tails)
    about = {start["seq_id"]: http.get(f"/sessions/{start['seq_id']}").json() for start in (kept, gone)}
    for start in (kept, gone):
        one = about[start["seq_id"]]
        assert len(one["workers"]) == 2
        assert one["workers"][start["worker_id"]]["device"] == one["cached_tokens"] == one["tokens"] - 1
    assert http.delete(f"/sessions/{gone['seq_id']}").json() == {"seq_id": gone["seq_id"], "deleted": True}
    again = events(http, "/generate", {"prompt": shared + tails[1], **asked})[0]
    assert again["cached_tokens"] <= counted["usage"]["prompt_tokens"]
    there = {"policy": "direct", "worker": kept["worker_id"]}  # a rested one would fetch all but the last block
    more = events(http, "/generate", {"prompt": " Go.", "seq_id": kept["seq_id"], **asked, **there})[0]
    assert more["cached_tokens"] == about[kept["seq_id"]]["tokens"] - 1


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/v1/completions", {"model": "demo", "prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"model": "demo", "prompt": "x " * 5000}, 400, "prompt"),
        ("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 10**12}, 400, "max_tokens"),
        ("/v1/completions", {"model": "demo", "prompt": "x", "temperature": -0.1}, 400, "temperature"),
        ("/v1/completions", {"model": "demo", "prompt": 7}, 400, "prompt"),
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404, "model"),
        ("/v1/chat/completions", {"model": "demo", "messages": "hello"}, 400, "messages"),
        ("/generate", {"prompt": ""}, 400, "prompt"),
        ("/generate", {"prompt": "x", "top_p": 2}, 400, "top_p"),
        ("/generate", {"prompt": "x", "exact": "yes"}, 400, "exact"),
    ],
)
def test_bad_input_names_the_field(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    assert field in response.text


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"prompt": "\xc3"}', b'{"prompt": NaN}'])
def test_malformed_bodies(http: httpx.Client, body: bytes) -> None:
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        response = http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, (path, body, response.text)


def test_a_ten_megabyte_body(http: httpx.Client) -> None:
    response = http.post("/generate", content=b'{"prompt": "' + b"x" * 10_000_000 + b'"}')
    assert response.status_code == 413


def test_health_and_metrics(http: httpx.Client) -> None:
    for path in ("/livez", "/readyz", "/health"):
        assert http.get(path).status_code == 200, path
    assert "kvfleet_ingress_" in http.get("/metrics").text
    assert http.get("/stats").status_code == 200


def test_everything_is_back_at_its_baseline(http: httpx.Client, up: Up) -> None:
    """After all the above: no sequence runs, no block is held, file descriptors do not grow with requests."""

    def fds() -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in up.descendants() if alive(pid))

    def is_idle() -> bool:
        loads = [worker["load"] for worker in http.get("/workers").json().values()]
        return not any(load["running"] or load["waiting"] or load["blocks_used"] for load in loads)

    time.sleep(1.2)  # two heartbeats: what was said last may be older than the last request
    wait_until(is_idle, pause_s=0.1)
    before = fds()
    for i in range(30):
        http.post("/generate", json={"prompt": f"x{i}", "max_tokens": 2})
        http.post("/generate", json={"prompt": ""})
    time.sleep(1.2)
    wait_until(is_idle, pause_s=0.1)
    assert fds() <= before + 4


def two_ready(http: httpx.Client) -> dict[str, Any]:
    end = time.monotonic() + LIMIT_S
    while True:
        workers: dict[str, Any] = http.get("/workers").json()
        if sum(worker["state"] == "ready" for worker in workers.values()) == 2:
            return workers
        assert time.monotonic() < end, workers
        time.sleep(0.2)


def test_zz_a_killed_workers_stream_goes_on_with_the_same_text(up: Up, http: httpx.Client) -> None:
    """Last in this file: a worker has to load again afterwards."""
    for body in ({"temperature": 0}, {"temperature": 0.8, "seed": 42}):
        workers = two_ready(http)
        asked = {"prompt": "KING RICHARD:\nNow is the", "max_tokens": 200, **body}
        whole = events(http, "/generate", asked)
        text, killed = "", None
        with http.stream("POST", "/generate", json=asked) as response:
            for line in sse.lines(response):
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if event["type"] == "start":
                    serving = event["worker_id"]
                elif event["type"] == "token":
                    text += event["token"]
                    if len(text) > 40 and killed is None:
                        killed = serving
                        os.kill(workers[serving]["pid"], signal.SIGKILL)
                else:
                    assert event["type"] == "done", event
        assert killed is not None
        assert text == "".join(event["token"] for event in whole if event["type"] == "token")
    wait_until(lambda: f"{killed} ended with code -9; starting it again" in up.stderr)
