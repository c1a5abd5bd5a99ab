"""Two regions as processes: an ingress in one serves what the other computes, and K and V go to whoever needs them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.nats_regions import NatsRegions
from tests.support.processes import Deployment
from tests.support.waiting import LIMIT_S, wait_until

PROMPT = [100 + i % 900 for i in range(2000)]
# 2,000 tokens of a prompt take 0.7 s to compute, and a link on this machine milliseconds.
PACE = ("--fake-tokens-per-s=1500", "--fake-prefill-tokens-per-s=3000")


class Region(Deployment):
    """A deployment with a name."""

    def __init__(self, name: str, nats_url: str, folder: Path) -> None:
        folder.mkdir()
        super().__init__(nats_url, folder)
        self.name = name

    def _env(self, role: str) -> dict[str, str]:
        return super()._env(role) | {"KVFLEET_REGION": self.name}

    def begin(self, worker: str, *flags: str) -> None:
        self.init()
        self.start("placement", f"p-{self.name}", "--spill-wait-s=0.2")
        self.start("worker", worker, "--runner=fake", *PACE, "--drain-s=0.5", "--workers-on-host=2", *flags)
        self.start("ingress", f"i-{self.name}", f"--port={self.port}")

    def complete(self, prompt: list[int], max_tokens: int = 4) -> dict[str, Any]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body["policy"] = "cost"  # by name: a busy placement is waited for, instead of a worker here by the ring

        def ask() -> httpx.Response | None:
            """None while no worker is known: what another region told last may be too old on a busy machine."""
            answer = httpx.post(f"{self.base}/v1/completions", json=body, timeout=LIMIT_S)
            return None if answer.status_code == 503 else answer

        answer = wait_until(ask, pause_s=0.1)
        assert answer is not None
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def rests(self, worker: str, generated: int) -> None:
        """Wait until it says that it is free, after so many tokens: whoever is placed from then on need not wait."""
        wait_until(lambda: (load := self.load(worker))["generated_tokens_total"] >= generated and not load["running"])

    def load(self, worker: str) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.base}/workers").json()[worker]["load"]
        return found


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[tuple[Region, Region]]:
    servers = NatsRegions(tmp_path / "nats")
    servers.start()
    us, eu = Region("us", servers.us.url, tmp_path / "us"), Region("eu", servers.eu.url, tmp_path / "eu")
    try:
        asyncio.run(servers.joined())
        us.begin("w0", "--slots=1")
        eu.begin("w0")
        us.wait_ready(1)
        eu.wait_ready(1)
        yield us, eu
    finally:
        us.stop()
        eu.stop()
        servers.stop()


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_what_spills_takes_its_blocks_along_and_what_comes_back_brings_them(regions: tuple[Region, Region]) -> None:
    us, eu = regions
    first = us.complete(PROMPT)
    assert cached(first) == 0
    assert us.load("w0")["hit_tokens_total"] == 0
    us.complete([8] * 64, 3000)  # so that it is known how long a slot may be taken
    us.rests("w0", 4 + 3000)

    busy = threading.Thread(target=us.complete, args=([9] * 64, 3900))  # the only slot is taken for long
    busy.start()
    wait_until(lambda: us.load("w0")["running"])
    longer = [*PROMPT, *[777] * 1500]
    spilled = us.complete(longer)
    wait_until(lambda: eu.load("w0")["prompt_tokens_total"] == len(longer))  # the other region served it
    assert cached(spilled) >= len(PROMPT) - 16, "and what its home had computed was not computed again"
    wait_until(lambda: eu.load("w0")["tiers"]["peer"]["hit_tokens_total"] >= len(PROMPT) - 16)
    busy.join()
    us.rests("w0", 4 + 3000 + 3900)

    back = us.complete([*longer, 5, 6, 7])  # home again: the rest comes from over there
    wait_until(lambda: us.load("w0")["tiers"]["peer"]["hit_tokens_total"] >= 1480)
    assert cached(back) >= len(longer) - 16


def test_an_ingress_serves_what_only_another_region_has(regions: tuple[Region, Region]) -> None:
    us, eu = regions
    expected = us.complete(PROMPT[:100], 8)["choices"][0]["text"]
    assert us.services["w0"].stop() == 0
    answer = us.complete(PROMPT[:100], 8)
    assert answer["choices"][0]["text"] == expected
    assert httpx.get(f"{us.base}/readyz").status_code == 200, "its requests are served"
    assert [one["id"] for one in httpx.get(f"{us.base}/v1/models").json()["data"]] == ["demo"]
    assert "kvfleet_ingress_spilled_attempts_total 1.0" in httpx.get(f"{us.base}/metrics").text
    wait_until(lambda: eu.load("w0")["prompt_tokens_total"] == 100)
