"""Clients that lose their connection to a real fleet: placement, two workers and the demo model."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import httpx

from tests.support import sse
from tests.support.up import Up
from tests.support.waiting import LIMIT_S


def read(up: Up, path: str, body: dict[str, Any], events: int | None = None, **headers: str) -> list[tuple[str, Any]]:
    """(id, data) of all events, or of so many: then the connection is closed."""
    found: list[tuple[str, Any]] = []
    sent = {"accept": "text/event-stream; event-ids=1"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    with httpx.stream("POST", f"{up.base}{path}", json=body, headers=sent, timeout=LIMIT_S, trust_env=False) as answer:
        assert answer.status_code == 200, answer.read()
        last = ""
        for line in sse.lines(answer):
            if line.startswith("id: "):
                last = line.removeprefix("id: ")
            elif line.startswith("data: ") and line != "data: [DONE]":
                found.append((last, json.loads(line.removeprefix("data: "))))
                if len(found) == events:
                    break
    return found


def idle(up: Up) -> dict[str, int]:
    """Tokens generated so far, by worker, once nothing runs."""
    end = time.monotonic() + LIMIT_S
    while True:
        workers = httpx.get(f"{up.base}/workers", trust_env=False).json()
        if not any(one["load"]["running"] or one["load"]["waiting"] for one in workers.values()):
            return {name: one["load"]["generated_tokens_total"] for name, one in workers.items()}
        assert time.monotonic() < end, workers
        time.sleep(0.05)


def test_a_session_turn_is_cut_three_times_and_whole(up: Up) -> None:
    asked: dict[str, Any] = {"prompt": "KING RICHARD:\nNow is the", "max_tokens": 120, "temperature": 0.8, "seed": 5}
    whole = read(up, "/generate", asked)
    body = {**asked, "seq_id": f"cut-{time.time()}"}
    events: list[tuple[str, Any]] = []
    for pieces in (20, 30, 10, None):
        headers = {"last_event_id": events[-1][0]} if events else {}
        events += read(up, "/generate", body, pieces, **headers)
        if pieces is not None:
            time.sleep(1.1)  # two heartbeats: the last one may be older than the cut
            before = idle(up)
            time.sleep(0.6)
            assert idle(up) == before, "nothing is computed for a client that is away"
    said = [event["token_id"] for _, event in events if event["type"] == "token"]
    assert said == [event["token_id"] for _, event in whole if event["type"] == "token"]
    assert len({event_id for event_id, _ in events}) == len(events)
    assert events[-1][1]["generated_text"] == whole[-1][1]["generated_text"]
    about = httpx.get(f"{up.base}/sessions/{body['seq_id']}", trust_env=False).json()
    assert about["turns"] == 1
    assert about["tokens"] == whole[-1][1]["usage"]["total_tokens"]


def test_choices_with_stops_and_logprobs_are_cut_anywhere(up: Up) -> None:
    body = {
        "model": "demo", "prompt": "ROMEO:\nBut soft", "max_tokens": 60, "temperature": 0.9, "seed": 3, "n": 3,
        "stop": ["the", "\n\n"], "logprobs": 2, "frequency_penalty": 0.4, "stream": True,
    }  # fmt: skip
    whole = read(up, "/v1/completions", body)
    events: list[tuple[str, Any]] = []
    for pieces in itertools.chain((13, 9, 17), itertools.repeat(None)):
        headers = {"last_event_id": events[-1][0]} if events else {}
        events += read(up, "/v1/completions", body, pieces, **headers)
        if ":end" in events[-1][0]:
            break

    def choices(found: list[tuple[str, Any]]) -> dict[int, list[Any]]:
        out: dict[int, list[Any]] = {}
        for _, chunk in found:
            for choice in chunk["choices"]:
                out.setdefault(choice["index"], []).append((choice["text"], choice["finish_reason"]))
        return out

    assert choices(events) == choices(whole)


def test_a_key_is_one_request_to_the_whole_fleet(up: Up) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who goes there?"}], "max_tokens": 20}
    key = {"idempotency-key": f"k-{time.time()}"}
    time.sleep(1.1)
    before = sum(idle(up).values())
    answers = [httpx.post(f"{up.base}/v1/chat/completions", json=body, headers=key, timeout=LIMIT_S) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    time.sleep(1.1)
    assert sum(idle(up).values()) - before == answers[0].json()["usage"]["completion_tokens"]
