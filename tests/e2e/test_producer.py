"""A bare producer: plain nats-py, no code of ours but JSON or msgpack."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgpack
import nats
import pytest

from tests.support.up import Up
from tests.support.waiting import LIMIT_S


async def ask(nats_url: str, body: dict[str, Any], as_json: bool, model: str = "demo") -> list[dict[str, Any]]:
    nc = await nats.connect(nats_url)
    inbox = nc.new_inbox()
    frames: list[dict[str, Any]] = []
    done = asyncio.Event()

    async def on_frame(message: Any) -> None:
        frame = json.loads(message.data) if as_json else msgpack.unpackb(message.data)
        frames.append(frame)
        if frame["type"] in ("finished", "failed", "moved"):
            done.set()

    await nc.subscribe(inbox, cb=on_frame)
    await nc.publish(
        f"kvf.generate.public.{model}",
        json.dumps(body).encode() if as_json else msgpack.packb(body),
        reply=inbox,
        headers={"Content-Type": "application/json"} if as_json else None,
    )
    await asyncio.wait_for(done.wait(), LIMIT_S)
    await asyncio.sleep(0.1)
    await nc.close()
    return frames


@pytest.mark.parametrize("as_json", [True, False])
async def test_text_in_tokens_out(up: Up, as_json: bool) -> None:
    body = {"prompt": "JULIET:\nO", "max_tokens": 10, "temperature": 0, "seed": 1}
    frames = await ask(up.nats_url, body, as_json)
    kinds = [frame["type"] for frame in frames]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert kinds.count("finished") == 1
    ids = [token for frame in frames if frame["type"] == "tokens" for token in frame["ids"]]
    assert len(ids) == frames[-1]["output_tokens"]
    again = await ask(up.nats_url, {**body, "prompt": None, "prompt_ids": [1, 2, 3, 4], "exact": True}, as_json)
    assert again[-1]["type"] == "finished"


@pytest.mark.parametrize("as_json", [True, False])
async def test_scores_of_a_prompt_come_before_its_tokens(up: Up, as_json: bool) -> None:
    body = {"prompt_ids": [5 + at % 900 for at in range(300)], "max_tokens": 2, "prompt_logprobs": 1}
    frames = await ask(up.nats_url, body, as_json)
    kinds = [frame["type"] for frame in frames]
    assert kinds == sorted(kinds, key=["started", "promptscores", "tokens", "finished"].index)
    scored = [frame for frame in frames if frame["type"] == "promptscores"]
    indices = [frame["index"] + at for frame in scored for at in range(len(frame["logprobs"]))]
    assert indices == list(range(1, 300))
    assert all(one["logprob"] <= 0 < one["rank"] for frame in scored for one in frame["logprobs"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "stop": 5}, "stop"),
        ({"prompt": "x", "exact": 1}, "exact"),
        ({"prompt": "x", "exact": "yes"}, "exact"),
        ({"prompt_ids": [10**6]}, "prompt_ids"),
        ({"prompt_ids": [5] * 5000}, "prompt_ids"),
    ],
)
async def test_bad_requests_get_one_failed_frame_that_names_the_field(up: Up, body: dict[str, Any], field: str) -> None:
    for as_json in (True, False):
        (failed,) = await ask(up.nats_url, body, as_json)
        assert failed["type"] == "failed"
        assert field in (failed.get("field") or failed["message"])


async def test_unknown_model(up: Up) -> None:
    (failed,) = await ask(up.nats_url, {"prompt": "x"}, True, model="nobody")
    assert failed["code"] == "model_not_found"
