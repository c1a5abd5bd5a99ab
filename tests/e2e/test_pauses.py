"""A whole fleet whose device holds little: a paused conversation is up again before it goes on, and a worker that dies
in a pause costs nobody a token."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.up import Up, command_of
from tests.support.waiting import LIMIT_S, wait_until

WORDS = ("the", "king", "castle", "wind", "door", "night", "again", "you", "who", "where", "light", "sea", "crown")
PAUSE_S = 4.0
LONG_PAUSE = 12.0  # times what one conversation takes: four others are served in it, however busy the machine


@pytest.fixture(scope="module")
def fleet() -> Iterator[Up]:
    """The device has room for about two and a half of the conversations."""
    up = Up("--port", "0", "--workers", "1", "--blocks", "40", "--dtype", "float32")
    try:
        yield up.wait_ready(180)
    finally:
        up.stop()


@pytest.fixture
def http(fleet: Up) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.base, timeout=LIMIT_S) as client:
        yield client


def prompt_of(number: int) -> str:
    chance = random.Random(number)
    return " ".join(chance.choice(WORDS) for _ in range(120))


def complete(http: httpx.Client, prompt: str, **fields: Any) -> tuple[str, str]:
    """The text and the id."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 6, "temperature": 0} | fields
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["id"]


def load(http: httpx.Client) -> dict[str, Any]:
    said: dict[str, Any] = http.get("/stats").json()["load"]
    return said


def test_a_paused_conversation_is_up_before_it_goes_on(http: httpx.Client) -> None:
    began = time.monotonic()
    complete(http, prompt_of(9))
    pause_s = max(LONG_PAUSE * (time.monotonic() - began), PAUSE_S)
    prompt = prompt_of(0)
    said, _ = complete(http, prompt, kvfleet={"expect_return_s": pause_s})
    wait_until(lambda: load(http)["paused"] == 1)
    for number in range(1, 5):  # others need the device meanwhile
        complete(http, prompt_of(number))
    wait_until(lambda: load(http)["brought_blocks_total"] > 0, pause_s + LIMIT_S, told="nothing was brought up")
    again, request = complete(http, prompt)
    assert again == said
    wait_until(lambda: load(http)["saved_s_total"] > 0)
    assert load(http)["paused"] == 0

    def actual() -> dict[str, Any]:
        answer = http.get(f"/v1/placements/{request}")
        found: dict[str, Any] = answer.json()["attempts"][-1]["actual"] if answer.status_code == 200 else {}
        return found

    wait_until(lambda: actual().get("ended"))
    assert actual()["saved_ms"] > 0
    assert actual()["cached_tokens"].keys() == {"device"}
    pauses = http.get("/v1/pauses").json()
    assert pauses["returns"] == 1
    assert pauses["restoring_saved_s"] > 0


def test_a_worker_that_dies_in_a_pause_costs_nobody_a_token(fleet: Up, http: httpx.Client) -> None:
    prompt = prompt_of(7)
    said, _ = complete(http, prompt, kvfleet={"expect_return_s": PAUSE_S})
    wait_until(lambda: load(http)["paused"] == 1)
    (worker,) = (pid for pid in fleet.descendants() if "kvfleet.worker.main" in command_of(pid))
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: http.get("/readyz").status_code == 200 and worker not in fleet.descendants(), pause_s=0.1)
    time.sleep(PAUSE_S)
    assert complete(http, prompt)[0] == said
