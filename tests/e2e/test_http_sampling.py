"""Sampling features on the bundled demo model, with the real openai package and a bare producer."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.test_producer import ask
from tests.support.processes import KVFLEET
from tests.support.up import Up
from tests.support.waiting import LIMIT_S

MESSAGES: Any = [{"role": "user", "content": "Good morrow, cousin."}]
CONTEXT = 4096


@pytest.fixture
def ai(up: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_choices_with_logprobs_stream_as_they_are_answered_whole(ai: openai.OpenAI) -> None:
    asked: Any = {
        "model": "demo", "messages": MESSAGES, "max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 3,
        "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    whole = ai.chat.completions.create(**asked)
    texts, ends = ["", "", ""], ["", "", ""]
    scores: list[list[Any]] = [[], [], []]
    usage = None
    for chunk in ai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ""
            scores[choice.index] += (choice.logprobs.content or []) if choice.logprobs else []
    assert [choice.message.content for choice in whole.choices] == texts
    assert [choice.finish_reason for choice in whole.choices] == ends
    assert len(set(texts)) == 3
    assert whole.usage is not None
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == sum(map(len, scores))
    for choice, streamed in zip(whole.choices, scores, strict=True):
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        # The whole answer's prompt was computed, the streamed one's was cached: the same up to rounding.
        assert [one.token for one in content] == [one.token for one in streamed]
        assert [one.logprob for one in content] == pytest.approx([one.logprob for one in streamed], abs=1e-3)
        assert b"".join(bytes(one.bytes or ()) for one in content).decode(errors="replace") == choice.message.content
        for one in content:
            tops = [top.logprob for top in one.top_logprobs]
            assert len(tops) == 3
            assert tops == sorted(tops, reverse=True)
            assert sum(map(math.exp, tops)) < 1.001
            assert one.logprob <= tops[0]


def test_greedy_takes_the_most_probable_token(ai: openai.OpenAI) -> None:
    reply = ai.completions.create(model="demo", prompt="ROMEO:\nBut soft", max_tokens=8, temperature=0, logprobs=2)
    scored = reply.choices[0].logprobs
    assert scored is not None
    assert "".join(scored.tokens or ()) == reply.choices[0].text
    for token, value, top in zip(
        scored.tokens or (), scored.token_logprobs or (), scored.top_logprobs or (), strict=True
    ):
        assert top[token] == value == max(top.values())


def test_biases_force_and_ban(ai: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": "ROMEO:\nBut soft", "max_tokens": 4, "temperature": 0}
    free = ai.completions.create(**asked, logprobs=0).choices[0]
    forced = ai.completions.create(**asked, logit_bias={"300": 100}, logprobs=0).choices[0]
    assert forced.logprobs is not None
    assert len(set(forced.logprobs.tokens or ())) == 1
    assert forced.text != free.text
    with pytest.raises(openai.BadRequestError) as refused:
        ai.completions.create(**asked, logit_bias={"1024": 1})
    assert refused.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("policy", "max_tokens", "prompt_tokens", "generated"),
    [("truncate_left", 6, CONTEXT - 6, 6), ("sliding", 6, None, 6), ("error", 6, 0, 0)],
)
def test_a_prompt_beyond_the_context_follows_the_policy(
    up: Up, policy: str, max_tokens: int, prompt_tokens: int | None, generated: int
) -> None:
    body = {
        "model": "demo", "prompt": [5, 6] * (CONTEXT // 2 + 200), "max_tokens": max_tokens, "ignore_eos": True,
        "context_overflow": policy, "temperature": 0,
    }  # fmt: skip
    answer = httpx.post(f"{up.base}/v1/completions", json=body, timeout=LIMIT_S)
    if not generated:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        return
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == generated
    if prompt_tokens is not None:
        assert usage["prompt_tokens"] == prompt_tokens


def test_a_generation_is_cut_to_what_the_prompt_leaves(up: Up) -> None:
    body = {
        "model": "demo", "prompt": [5] * (CONTEXT - 3), "max_tokens": 1000, "ignore_eos": True,
        "context_overflow": "truncate_generation",
    }  # fmt: skip
    answer = httpx.post(f"{up.base}/v1/completions", json=body, timeout=LIMIT_S).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("as_json", [True, False])
async def test_a_bare_producer_gets_choices_and_logprobs(up: Up, as_json: bool) -> None:
    bias = {"300": 100} if as_json else {300: 100}
    body = {"prompt": "JULIET:\nO", "max_tokens": 5, "seed": 1, "n": 2, "logprobs": 1, "logit_bias": bias}
    frames = await ask(up.nats_url, body, as_json)
    kinds = [frame["type"] for frame in frames]
    assert (kinds[0], kinds[-1], kinds.count("choicefinished")) == ("started", "finished", 2)
    for choice in (0, 1):
        mine = [frame for frame in frames if frame["type"] == "tokens" and frame.get("choice", 0) == choice]
        assert [token for frame in mine for token in frame["ids"]] == [300] * 5
        assert all(len(frame["logprobs"]) == len(frame["ids"]) for frame in mine)
        assert all(len(scores["top_ids"]) == 1 for frame in mine for scores in frame["logprobs"])
    assert frames[-1]["output_tokens"] == 10


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 0}, "n"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logprobs": 1000}, "logprobs"),
        ({"context_overflow": "cut"}, "context_overflow"),
        ({"min_p": 2}, "min_p"),
    ],
)
async def test_a_bare_producers_mistakes_are_named(up: Up, body: dict[str, Any], field: str) -> None:
    for as_json in (True, False):
        (failed,) = await ask(up.nats_url, {"prompt": "x", **body}, as_json)
        assert failed["type"] == "failed"
        assert failed["field"].startswith(field)


def generate(up: Up, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [KVFLEET, "generate", "ROMEO:\nBut soft", f"--url={up.base}", "--max-tokens=3", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_the_command_line_asks_for_them_too(up: Up) -> None:
    done = generate(
        up, "--temperature=0", "--logprobs=1", "--repetition-penalty=1.1", "--min-p=0.1", "--context-overflow=sliding"
    )
    assert done.returncode == 0, done.stderr
    scored = re.findall(r"^.+ -?\d+\.\d{3}   of .+ -?\d+\.\d{3}$", done.stderr, re.MULTILINE)
    assert len(scored) == 3, done.stderr
    refused = generate(up, "--context-overflow=cut")
    assert refused.returncode == 1
    assert "context_overflow: must be one of" in refused.stderr
