"""Beam search over HTTP: on the demo model as transformers finds it, and through the death of its worker."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from tests.e2e.test_producer import ask
from tests.support.up import Up
from tests.support.waiting import LIMIT_S, wait_until

PAD = 0
PROMPT = "KING RICHARD:\nNow is the"
COMPLETION: dict[str, Any] = {
    "model": "demo", "prompt": PROMPT, "max_tokens": 24, "n": 3,
    "extra_body": {"use_beam_search": True, "best_of": 5, "length_penalty": 0.7, "return_token_ids": True},
}  # fmt: skip
CHAT: dict[str, Any] = {
    "model": "demo", "messages": [{"role": "user", "content": "Good morrow, cousin."}], "max_tokens": 20, "n": 2,
    "extra_body": {"use_beam_search": True, "best_of": 4, "early_stopping": True},
}  # fmt: skip


def client_of(up: Up) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{up.base}/v1", api_key="none", max_retries=0)


def test_what_transformers_finds(up: Up) -> None:
    with client_of(up) as ai:
        answer = ai.completions.create(**COMPLETION).to_dict()
    prompt: Any = answer["choices"][0]["prompt_token_ids"]  # type: ignore[index]
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        max_new_tokens=24, num_beams=5, num_return_sequences=3, length_penalty=0.7, early_stopping=False,
        pad_token_id=PAD,
    )  # fmt: skip
    eos = model.generation_config.eos_token_id
    expected = []
    for row in found[:, len(prompt) :].tolist():
        ends = [at for at, token in enumerate(row) if token in (PAD, *(eos if isinstance(eos, list) else [eos]))]
        expected.append(row[: min(ends, default=len(row))])
    assert [choice["token_ids"] for choice in answer["choices"]] == expected  # type: ignore[index]
    assert answer["usage"]["prompt_tokens"] == len(prompt)  # type: ignore[index]
    assert answer["usage"]["completion_tokens"] == sum(map(len, expected))  # type: ignore[index]


def test_a_chat_streams_at_the_end_what_it_answers_whole(up: Up) -> None:
    with client_of(up) as ai:
        whole = ai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=1)
        texts, ends, usage = ["", ""], ["", ""], None
        for chunk in ai.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert [choice.message.content for choice in whole.choices] == texts
    assert [choice.finish_reason for choice in whole.choices] == ends
    assert texts[0] != texts[1]
    assert whole.usage is not None
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        assert choice.logprobs is not None
        spoken = b"".join(bytes(one.bytes or ()) for one in choice.logprobs.content or ())
        assert spoken.decode(errors="replace") == choice.message.content


def test_a_stop_string_ends_a_beam(up: Up) -> None:
    with client_of(up) as ai:
        text = ai.completions.create(**COMPLETION).choices[0].text
        word = text.split()[2]
        told = ai.completions.create(**COMPLETION, stop=word)
    assert all(word not in choice.text for choice in told.choices)
    assert "stop" in {choice.finish_reason for choice in told.choices}


@pytest.mark.parametrize("as_json", [True, False])
async def test_a_bare_producer_has_the_best_beams_too(up: Up, as_json: bool) -> None:
    body = {
        "prompt": PROMPT, "max_tokens": 24, "n": 3,
        "beams": {"width": 5, "length_penalty": 0.7, "early_stopping": "false"},
    }  # fmt: skip
    frames = await ask(up.nats_url, body, as_json)
    texts = ["", "", ""]
    for frame in frames:
        if frame["type"] == "tokens":
            texts[frame["choice"]] += "".join(frame["text"])
    with client_of(up) as ai:
        assert texts == [choice.text for choice in ai.completions.create(**COMPLETION).choices]
    assert frames[-1]["type"] == "finished"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tools"),
        ({"temperature": 0.7}, "temperature"),
        ({"extra_body": {**CHAT["extra_body"], "guided_regex": "a+"}}, "guided_regex"),
        ({"n": 5}, "best_of"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(up: Up, changes: dict[str, Any], param: str) -> None:
    with client_of(up) as ai, pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(**{**CHAT, **changes})
    assert caught.value.param == param


def test_the_worker_is_killed_in_the_middle() -> None:
    """The client has the same answer, with no error, streamed or not."""
    fleet = Up("--port", "0", "--runner", "fake", "--fake-tokens-per-s", "100").wait_ready()
    body = {
        "model": "demo", "prompt": "x", "max_tokens": 80, "n": 3, "use_beam_search": True, "best_of": 4,
        "ignore_eos": True,
    }  # fmt: skip

    def searching() -> list[int]:
        """As heartbeats tell, twice a second; a search takes longer."""
        workers = httpx.get(f"{fleet.base}/workers", trust_env=False).json()
        return [one["pid"] for one in workers.values() if one["load"]["running"] == 4]

    def kill() -> None:
        found: list[int] = []
        wait_until(lambda: found.extend(searching()) or found)
        os.kill(found[0], signal.SIGKILL)

    def ask(stream: bool) -> list[str]:
        asked = {**body, "stream": stream}
        told = httpx.post(f"{fleet.base}/v1/completions", json=asked, timeout=LIMIT_S, trust_env=False)
        assert told.status_code == 200, told.text
        texts = [""] * 3
        lines = [line[6:] for line in told.text.splitlines() if line.startswith("data: {")] if stream else [told.text]
        for line in lines:
            assert "error" not in json.loads(line)
            for choice in json.loads(line)["choices"]:
                texts[choice["index"]] += choice["text"]
        return texts

    try:
        expected = ask(stream=False)
        assert len(set(expected)) == 3
        for stream in (False, True):
            wait_until(lambda: httpx.get(f"{fleet.base}/health", trust_env=False).json().get("workers_ready", 0) == 2)
            wait_until(lambda: not searching())
            killing = threading.Thread(target=kill)
            killing.start()
            assert ask(stream) == expected
            killing.join()
        assert "kill" in fleet.stderr or "-9" in fleet.stderr
    finally:
        assert fleet.stop() == 0
