"""A fleet on a hybrid model: turns go on from snapshots, workers go in the middle of an answer; all as `generate()`."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfleet.worker.blocks.content_index import common_prefix
from tests.support import sse
from tests.support.tiny_hybrid import write_tiny_hybrid
from tests.support.up import Up
from tests.support.waiting import LIMIT_S, wait_until

GREEDY = {"model": "hybrid", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LONG = 320  # tokens: it is to be moved, not to end, while its worker drains
BOUND = 2 * 16  # tokens between two snapshots


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Up]:
    flags = ("--port", "0", "--model", str(folder), "--served-model-name", "hybrid", "--dtype", "float32")
    up = Up(*flags, "--blocks", "400", env={"KVFLEET_STATE_EVERY": "2", "KVFLEET_DRAIN_S": "5"})
    try:
        yield up.wait_ready()
    finally:
        up.stop()


@pytest.fixture
def http(fleet: Up) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.base, timeout=LIMIT_S, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    asked = torch.tensor([prompt])
    told = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(asked)}
    ids: list[int] = model.generate(asked, **told)[0, len(prompt) :].tolist()
    return ids


def words(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10, 1000) for _ in range(count)]


def post(http: httpx.Client, path: str, **fields: Any) -> tuple[list[list[int]], list[int], int]:
    """Each choice's tokens, the prompt's, and how many of them were cached."""
    answer = http.post(path, json=GREEDY | fields)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    asked = told.get("prompt_token_ids") or told["choices"][0]["prompt_token_ids"]
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [choice["token_ids"] for choice in told["choices"]], asked, cached


def workers(http: httpx.Client) -> dict[str, dict[str, Any]]:
    told: dict[str, dict[str, Any]] = http.get("/workers").json()
    return told


def test_a_chat_goes_on_from_its_snapshots(http: httpx.Client, model: Any) -> None:
    """Its words are not always the tokens that they came from: then from the last snapshot before they differ."""
    question = "Where is the king tonight, and who keeps the castle door against the wind and the sea? " * 2
    chat = [{"role": "user", "content": question}]
    asked: list[list[int]] = []
    for turn in range(3):
        body = GREEDY | {"messages": chat, "max_tokens": 40}
        told = http.post("/v1/chat/completions", json=body).json()
        (choice,), prompt = told["choices"], told["prompt_token_ids"]
        assert choice["token_ids"] == generated(model, prompt, 40)
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        same = max((common_prefix(prompt, one) for one in asked), default=0)
        assert same >= cached >= same - BOUND, "the last snapshot is nearer"
        assert cached > 0 or not turn
        asked.append([*prompt, *choice["token_ids"]])
        chat += [choice["message"], {"role": "user", "content": "And then?"}]
        chat = [{"role": one["role"], "content": one["content"]} for one in chat]


def test_a_session_goes_on_from_its_last_token_and_nothing_of_it_outlives_its_deletion(http: httpx.Client) -> None:

    def generate(prompt: str) -> tuple[int, int]:
        """How many tokens the conversation has then, and how many of them were cached."""
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "seq_id": "turns"}
        events = [
            json.loads(line[6:]) for line in http.post("/generate", json=body).text.splitlines() if line[:1] == "d"
        ]
        usage = events[-1]["usage"]
        return usage["total_tokens"], next(one["cached_tokens"] for one in events if "cached_tokens" in one)

    opening = "KING RICHARD: the castle, the wind, and the night again. " * 2
    total, _ = generate(opening)
    again, cached = generate(" Who goes there?")
    assert cached == total - 1
    assert again > total
    wait_until(lambda: sum(one["load"]["tiers"]["state"]["blocks"] for one in workers(http).values()))
    assert http.delete("/sessions/turns").status_code in (200, 204)
    time.sleep(1.0)  # what is on its way down goes when it is there
    assert generate(opening)[1] == 0


@pytest.mark.parametrize("length", [45, 64, 100])
def test_choices_and_repetitions_are_one_answer(http: httpx.Client, model: Any, length: int) -> None:
    prompt = words(length, length)
    expected = generated(model, prompt, 24)
    first, _, cached = post(http, "/v1/completions", prompt=prompt, max_tokens=24, n=2)
    assert (first, cached) == ([expected, expected], 0)
    again, _, cached = post(http, "/v1/completions", prompt=prompt, max_tokens=24, n=2)
    assert again == first
    assert cached >= length - BOUND
    shorter, _, cached = post(http, "/v1/completions", prompt=prompt[:-7], max_tokens=10)
    assert shorter == [generated(model, prompt[:-7], 10)]
    assert cached == (length - 8) // BOUND * BOUND


def fetched(http: httpx.Client, worker: str) -> int:
    """Tokens whose blocks it fetched from the other one, or from its vault: a busy worker may be gone by then."""
    tiers = workers(http)[worker]["load"]["tiers"]
    tokens: int = tiers["peer"]["hit_tokens_total"] + tiers["vault"]["hit_tokens_total"]
    return tokens


class Streamed(threading.Thread):
    """A long answer, read as it comes."""

    def __init__(self, base: str, prompt: list[int]) -> None:
        super().__init__(daemon=True)
        self.url, self.prompt, self.ids, self.ended = f"{base}/v1/completions", prompt, list[int](), ""
        self.worker = ""  # that it began at
        self.start()

    def run(self) -> None:
        body = GREEDY | {"prompt": self.prompt, "max_tokens": LONG, "stream": True}
        with httpx.stream("POST", self.url, json=body, timeout=LIMIT_S, trust_env=False) as answer:
            self.worker = answer.headers["x-kvfleet-worker"]
            for line in sse.lines(answer):
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.ids += choice.get("token_ids") or ()
                        self.ended = choice["finish_reason"] or self.ended


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
def test_an_answer_outlives_its_worker(fleet: Up, http: httpx.Client, model: Any, number: int) -> None:
    """It goes on where it was, on the other one, and a repetition finds there what that one has computed. A killed one
    is started again, a drained one is not."""
    wait_until(lambda: [one["state"] for one in workers(http).values()] == ["ready"] * 2)
    prompt = words(1000 + number, 70)
    expected = generated(model, prompt, LONG)
    stream = Streamed(fleet.base, prompt)
    wait_until(lambda: len(stream.ids) > 30)
    busy = workers(http)[stream.worker]
    os.kill(busy["pid"], number)
    assert len(stream.ids) < LONG - 50, "the answer was too short for this test"
    stream.join(LIMIT_S)
    assert stream.ended == "length"
    assert stream.ids == expected
    if number == signal.SIGTERM:  # its blocks, and a state at the end of the last, went to the other one
        (other,) = (name for name, one in workers(http).items() if one["pid"] != busy["pid"])
        wait_until(lambda: fetched(http, other) >= len(prompt) // 16 * 16)
    again, _, cached = post(http, "/v1/completions", prompt=[*prompt, *expected], max_tokens=4)
    assert again == [generated(model, [*prompt, *expected], 4)]
    assert cached >= len(prompt) + LONG - 1 - BOUND
