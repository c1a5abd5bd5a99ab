"""OpenAI's library: chats and completions, whole and streamed, and what it makes of errors."""

from __future__ import annotations

from typing import Any

import httpx
import openai
from checks import KEY, MODEL, OPENAI, raised, run_checks
from openai import AsyncOpenAI, OpenAI

client = OpenAI(base_url=OPENAI, api_key=KEY)
ASKED: list[Any] = [
    {"role": "system", "content": "You are a sentry."},
    {"role": "user", "content": "Who goes there?"},
]
SEEDED: Any = {"model": MODEL, "messages": ASKED, "seed": 7, "temperature": 0.8, "max_tokens": 24}


def check_models() -> Any:
    models = client.models.list()
    assert MODEL in [one.id for one in models]
    assert client.models.retrieve(MODEL).object == "model"
    return models.model_dump()


def check_whole() -> Any:
    answer = client.chat.completions.create(**SEEDED)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 24
    assert answer._request_id
    return answer.model_dump()


def check_stream() -> Any:
    whole = client.chat.completions.create(**SEEDED)
    chunks = list(client.chat.completions.create(**SEEDED, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    return said


def check_stream_helper() -> Any:
    with client.chat.completions.stream(**SEEDED | {"max_tokens": 200, "stop": ["\n"]}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    return deltas


def check_logprobs() -> Any:
    answer = client.chat.completions.create(**SEEDED, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert answer.usage is not None
    said = b"".join(bytes(token.bytes or ()) for token in logprobs.content).decode(errors="replace")
    assert answer.choices[0].message.content in said  # an end token is none of the text
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0.0
    return logprobs.content[0].model_dump()


def check_choices_and_seeds() -> Any:
    first, again = (client.chat.completions.create(**SEEDED | {"n": 3}) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in again.choices]
    return texts


def check_stop() -> Any:
    answer = client.chat.completions.create(**SEEDED)
    assert answer.choices[0].message.content
    stop = answer.choices[0].message.content[5:9]
    cut = client.chat.completions.create(**SEEDED, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == answer.choices[0].message.content.partition(stop)[0]
    return [stop, cut.choices[0].message.content]


def check_errors() -> Any:
    stranger = OpenAI(base_url=OPENAI, api_key="kvf_wrong")
    seen = {}
    wrong: list[tuple[str, type[openai.APIStatusError], OpenAI, Any]] = [
        ("temperature", openai.BadRequestError, client, {"temperature": 9.0}),
        ("no_such_field", openai.BadRequestError, client, {"extra_body": {"no_such_field": 1}}),
        ("max_tokens", openai.BadRequestError, client, {"max_tokens": 10**6}),
        ("model", openai.NotFoundError, client, {"model": "no-such-model"}),
        ("authorization", openai.AuthenticationError, stranger, {}),
    ]
    for name, kind, asking, change in wrong:
        error = raised(kind, asking.chat.completions.create, **SEEDED | change)
        assert error.param == name
        assert error.request_id
        seen[name] = [error.status_code, error.code, error.type, str(error)]
    assert seen["model"][1] == "model_not_found"
    assert raised(openai.NotFoundError, client.models.retrieve, model="no-such-model").request_id
    return seen


def check_timeout() -> Any:
    hasty = client.with_options(timeout=0.3, max_retries=0).chat.completions
    much = SEEDED | {"max_tokens": 1500, "n": 8}  # no answer is there before a client that has no core looks again
    error = raised(openai.APITimeoutError, hasty.create, **much, extra_body={"ignore_eos": True})
    assert check_whole()  # the fleet goes on
    return str(error)


def check_cancel() -> Any:
    """A stream that is closed early; the next request is answered."""
    stream = client.chat.completions.create(
        **SEEDED | {"max_tokens": 1500}, stream=True, extra_body={"ignore_eos": True}
    )
    some = [next(iter(stream)).choices[0].delta.content for _ in range(5)]
    stream.close()
    assert check_whole()
    return some


def check_raw() -> Any:
    raw = client.chat.completions.with_raw_response.create(**SEEDED)
    assert raw.headers["x-request-id"]
    with client.chat.completions.with_streaming_response.create(**SEEDED, stream=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    assert raw.parse().choices[0].message.content
    return dict(raw.headers)


async def check_async() -> Any:
    async with AsyncOpenAI(base_url=OPENAI, api_key=KEY, timeout=httpx.Timeout(60)) as asking:
        whole = await asking.chat.completions.create(**SEEDED)
        said = ""
        async for chunk in await asking.chat.completions.create(**SEEDED, stream=True):
            said += chunk.choices[0].delta.content or ""
    assert said == whole.choices[0].message.content
    return said


def check_completions() -> Any:
    asked: Any = {"model": MODEL, "prompt": "O Romeo,", "max_tokens": 16, "temperature": 0, "logprobs": 2}
    answer = client.completions.create(**asked)
    said = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True) if chunk.choices)
    assert said == answer.choices[0].text
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs
    assert answer.usage is not None
    assert len(answer.choices[0].logprobs.token_logprobs) == answer.usage.completion_tokens
    return answer.model_dump()


def check_prompts_and_echo() -> Any:
    """What evaluations ask: several prompts at once, and how likely each token of them was."""
    prompts = ["O Romeo, Romeo!", "My kingdom for a horse"]
    asked: Any = {"model": MODEL, "prompt": prompts, "max_tokens": 1, "temperature": 0}
    answer = client.completions.create(**asked, echo=True, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text.startswith(prompt)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs
        first, *others = choice.logprobs.token_logprobs
        assert first is None
        assert all(one <= 0.0 for one in others)
    said = [choice.text for choice in client.completions.create(**asked).choices]
    assert said == [choice.text.removeprefix(prompt) for prompt, choice in zip(prompts, answer.choices, strict=True)]
    return answer.model_dump()


if __name__ == "__main__":
    run_checks(globals())
