"""A whole fleet whose devices hold little: what was said comes back from host and vault, killed vaults included."""

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

WORDS = [
    *("the", "king", "castle", "wind", "door", "night", "again", "you", "who", "where", "light", "mother", "father"),
    *("come", "go", "stay", "sword", "ship", "sea", "crown", "friend", "enemy", "letter", "road", "horse", "fire"),
]
CONVERSATIONS = 8


@pytest.fixture(scope="module")
def fleet() -> Iterator[Up]:
    """The device of each of the two workers has room for about two and a half of the conversations."""
    up = Up("--port", "0", "--blocks", "40", "--dtype", "float32", "--log-level", "info")
    try:
        yield up.wait_ready(180)
    finally:
        up.stop()


@pytest.fixture
def http(fleet: Up) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.base, timeout=LIMIT_S) as client:
        yield client


def complete(http: httpx.Client, number: int, **fields: Any) -> tuple[str, int, str]:
    """The text, how many prompt tokens were cached, and the id."""
    chance = random.Random(number)
    prompt = " ".join(chance.choice(WORDS) for _ in range(120))
    body = {"model": "demo", "prompt": prompt, "max_tokens": 6, "temperature": 0} | fields
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"], said["id"]


def by_tier(http: httpx.Client, request: str) -> int | None:
    """How many tokens were there, as placement heard it; None where it was not waited for, or has not heard it yet."""
    answer = http.get(f"/v1/placements/{request}")
    cached = answer.json()["attempts"][-1]["actual"]["cached_tokens"] if answer.status_code == 200 else None
    return sum(cached.values()) if cached else None


def restored(http: httpx.Client) -> dict[str, int]:
    """Tokens that came from tiers below the device, in all."""
    tiers = http.get("/stats").json()["load"]["tiers"]
    return {name: tier["hit_tokens_total"] for name, tier in tiers.items()}


def pids(fleet: Up, service: str) -> list[int]:
    return [pid for pid in fleet.descendants() if f"kvfleet.{service}.main" in command_of(pid)]


def test_conversations_come_back_from_below_and_say_the_same(http: httpx.Client) -> None:
    first = [complete(http, number)[0] for number in range(CONVERSATIONS)]
    for _ in range(4):
        time.sleep(0.7)  # events and heartbeats arrive
        again = [complete(http, number) for number in range(CONVERSATIONS)]
        assert [text for text, _, _ in again] == first
    assert sum(cached for _, cached, _ in again) > 0
    wait_until(lambda: sum(restored(http)[tier] for tier in ("host", "vault", "peer")) > 500, pause_s=0.1)
    assert wait_until(lambda: any(by_tier(http, request) == cached for _, cached, request in again))
    metered = http.get("/workers").json()
    assert all(worker["load"]["tiers"]["host"]["offloaded_blocks_total"] for worker in metered.values())


def test_an_exact_request_is_served(http: httpx.Client) -> None:
    assert complete(http, 1, exact=True)[0] == complete(http, 1)[0]
    assert http.post("/v1/completions", json={"model": "demo", "prompt": "x", "exact": 1}).status_code == 400


def test_a_killed_vault_costs_nobody_a_wrong_or_missing_token(fleet: Up, http: httpx.Client) -> None:
    expected = [complete(http, number)[0] for number in range(CONVERSATIONS)]
    (vault,) = pids(fleet, "vault")
    os.kill(vault, signal.SIGKILL)
    for _ in range(2):
        assert [complete(http, number)[0] for number in range(CONVERSATIONS)] == expected
    end = time.monotonic() + LIMIT_S
    while http.get("/health").json().get("vaults") != 1 or not pids(fleet, "vault"):
        assert time.monotonic() < end, "it is started again"
        time.sleep(0.1)
    assert [complete(http, number)[0] for number in range(CONVERSATIONS)] == expected


def restarted(fleet: Up, http: httpx.Client) -> dict[str, Any]:
    """w0, once it is ready in a new life."""
    before = http.get("/workers").json()["w0"]
    os.kill(before["pid"], signal.SIGKILL)
    end = time.monotonic() + LIMIT_S
    while (after := http.get("/workers").json().get("w0", {})).get("state") != "ready" or (
        after["epoch"] == before["epoch"] or not after["load"]["blocks_total"]
    ):
        assert time.monotonic() < end, fleet.stderr[-2000:]
        time.sleep(0.05)
    assert isinstance(after, dict)
    return after


def test_a_new_worker_preloads_what_is_in_demand(fleet: Up, http: httpx.Client) -> None:
    """A killed one is started again, with an empty device: it says that it is ready when it has the hottest blocks.

    It does not wait for placement for longer than a second: a machine that is too busy for that is asked again.
    """
    for _ in range(3):
        for number in [*range(CONVERSATIONS)] * 3:  # what was found twice is in demand
            complete(http, number)
        time.sleep(1.5)  # what goes down is in the vault
        load = restarted(fleet, http)["load"]
        assert load["prompt_tokens_total"] == 0, "nobody has asked it for anything"
        if load["blocks_addressed"]:
            return
    pytest.fail(fleet.stderr[-4000:])


def test_a_deleted_session_is_found_nowhere(http: httpx.Client) -> None:
    prompt = " ".join(random.Random(77).choice(WORDS) for _ in range(120))

    def generate(**fields: Any) -> int:
        """How many of its tokens were cached."""
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0} | fields
        text = http.post("/generate", json=body).text
        return int(text.split('"cached_tokens":')[1].split(",")[0].rstrip("}"))

    generate(seq_id="to-be-deleted")
    where = http.get("/sessions/to-be-deleted").json()["workers"]
    assert any(tiers["device"] or tiers["host"] for tiers in where.values())
    assert http.delete("/sessions/to-be-deleted").status_code in (200, 204)
    time.sleep(2.0)  # what is on its way down goes when it is there
    assert generate() < 16
