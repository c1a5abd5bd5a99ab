"""Bodies of requests: what is read, and every refusal by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvchat.messages import ChatMessage
from kvfleet.ingress.requests.asks import MAX_TOKENS_LIMIT, SamplingAsk, plan_sampling
from kvfleet.ingress.requests.bodies import check_vocabulary, read_chat, read_completion, read_generate
from kvfleet.ingress.runs.repeats import digest_of
from kvproto.errors import ContextLengthExceeded, InvalidRequest
from kvproto.messages import Bundle, Overflow, Sampling
from kvproto.schema import MAX_DEPTH
from kvservice.fields import parse_body

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "p", **fields}


BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**60}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.001}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1, True]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice[0]"),
    ({"guided_grammar": "x" * 1_048_577}, "guided_grammar"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"temprature": 0}, "temprature"),
    ({"x" * 100: 0}, "x" * 80),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": []}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "1"}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": "x"}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": True}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": []}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": "x"}, "repetition_penalty"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": "x"}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": 100.1}}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(4097)}}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": "x"}, "min_tokens"),
    ({"context_overflow": "cut"}, "context_overflow"),
    ({"context_overflow": 1}, "context_overflow"),
    ({"context_overflow": ["sliding"]}, "context_overflow"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": "x"}, "logprobs"),
    ({"exact": 1}, "exact"),
    ({"exact": 0.0}, "exact"),
    ({"exact": "true"}, "exact"),
    ({"exact": [True]}, "exact"),
    ({"exact": {}}, "exact"),
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"model": "x" * 257}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"prompt_logprobs": 0, "context_overflow": "sliding"}, "context_overflow"),
    ({"echo": True}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"seq_id": ""}, "seq_id"),
    ({"seq_id": 5}, "seq_id"),
    ({"seq_id": "x" * 1025}, "seq_id"),
    ({"prompt": "x"}, "prompt"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"logprobs": 0}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
]
BAD_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[1], [2, "x"]]}, "prompt[1][1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 128}, "n"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"seq_id": "s"}, "seq_id"),
    ({"echo": 1}, "echo"),
    ({"prompt_logprobs": 0, "context_overflow": "truncate_left"}, "context_overflow"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"echo": True, "logprobs": 1, "context_overflow": "truncate_left"}, "context_overflow"),
    ({"echo": True, "logprobs": 6}, "logprobs"),
    ({"suffix": "s"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"n": 3, "best_of": 4}, "best_of"),
    ({"best_of": "x"}, "best_of"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
]
BAD_GENERATE: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["x"]}, "prompt"),
    ({"seq_id": ""}, "seq_id"),
    ({"seq_id": 1}, "seq_id"),
    ({"model_name": 1}, "model_name"),
    ({"n": 2}, "n"),
    ({"stream": False}, "stream"),
    ({"messages": MESSAGES}, "messages"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
]


def refused(error: pytest.ExceptionInfo[InvalidRequest], field: str) -> None:
    assert error.value.field == field
    assert error.value.http_status == 400
    assert str(error.value).startswith(field)


@pytest.mark.parametrize(("fields", "field"), BAD_CHAT + BAD_SAMPLING)
def test_a_bad_chat_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_chat(chat(**fields))
    refused(error, field)


@pytest.mark.parametrize(("fields", "field"), BAD_COMPLETION + BAD_SAMPLING)
def test_a_bad_completion_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_completion(completion(**fields))
    refused(error, field)


@pytest.mark.parametrize(("fields", "field"), BAD_GENERATE + BAD_SAMPLING)
def test_a_bad_generate_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_generate({"prompt": "p", **fields})
    refused(error, field)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"a":NaN}', b'{"a":1e999}', b"[" * 9999]
)
def test_a_body_that_is_no_object(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_body(data)
    refused(error, "body")


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 255, 1022])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_a_field_that_is_nested_too_deep_is_named(levels: int, begin: str, end: str) -> None:
    nested = (begin * levels + "0" + end * levels).replace('{"a":0}', '{"a":[]}')
    with pytest.raises(InvalidRequest) as error:
        parse_body(f'{{"model": "m", "metadata": {nested}}}'.encode())
    refused(error, "metadata")


def test_a_field_may_be_nested_so_deep_and_many_are_side_by_side() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    body = parse_body(f'{{"metadata": {deep}, "messages": [{",".join(["[{}]"] * 1000)}]}}'.encode())
    assert len(body["messages"]) == 1000
    digest_of("chat", body)


def test_what_asks_for_nothing_special_is_allowed() -> None:
    neutral = {
        "n": 1,
        "tools": [],
        "logprobs": False,
        "top_logprobs": None,
        "logit_bias": {},
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "service_tier": "auto",
        "modalities": ["text"],
        "user": "somebody",
        "metadata": {"any": "thing"},
        "store": True,
        "safety_identifier": "somebody",
        "prompt_cache_key": "k",
        "unknown_field": None,
        "skip_special_tokens": True,
        "guided_json": None,
        "chat_template_kwargs": {},
        "stop_token_ids": [],
        "temperature": None,
        "stop": None,
        "stream_options": None,
        "seq_id": None,
        "max_tokens": None,
    }
    assert read_chat(chat(**neutral)) == read_chat(chat())


def test_a_chat_is_read_whole() -> None:
    ask = read_chat(
        chat(
            messages=[
                {"role": "developer", "content": "be brief"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "u",
                },
                {"role": "assistant"},
            ],
            max_tokens=5,
            max_completion_tokens=7.0,
            temperature=0,
            top_k=-1,
            stop="x",
            stream=True,
            stream_options={"include_usage": True},
            seq_id="s",
            ignore_eos=True,
        )
    )
    assert ask.messages == (
        ChatMessage("system", "be brief"),
        ChatMessage("user", "ab", "u"),
        ChatMessage("assistant", ""),
    )
    assert ask.sampling == SamplingAsk(
        max_tokens=7,
        temperature=0.0,
        top_k=0,
        stop=("x",),
        ignore_eos=True,
        max_tokens_field="max_completion_tokens",
    )
    assert (ask.stream, ask.include_usage, ask.seq_id) == (True, True, "s")


def test_prompts_of_completions() -> None:
    for prompt, read in (
        ("text", ("text",)),
        (["text"], ("text",)),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], "b", [2, 3]], ((1,), "b", (2, 3))),
        (["a"] * 128, ("a",) * 128),
    ):
        assert read_completion(completion(prompt=prompt)).prompts == read
    check_vocabulary((0, 9), 10)
    for bad in ((0, 10), (0, -1)):
        with pytest.raises(InvalidRequest) as error:
            check_vocabulary(bad, 10)
        refused(error, "prompt[1]")


def test_what_is_asked_of_a_prompt() -> None:
    for said, of_prompt, of_answer in (
        ({}, None, None),
        ({"echo": True}, None, None),
        ({"logprobs": 2}, None, 2),
        ({"echo": True, "logprobs": 2}, 2, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 1}, 2, 2),
        ({"logprobs": 0, "prompt_logprobs": 7}, 7, 0),
        ({"echo": True, "context_overflow": "sliding"}, None, None),
    ):
        sampling = read_completion(completion(**said)).sampling
        assert (sampling.prompt_logprobs, sampling.logprobs) == (of_prompt, of_answer), said
    assert read_completion(completion(echo=True, max_tokens=0)).sampling.max_tokens == 0
    assert read_chat(chat(prompt_logprobs=0)).sampling.prompt_logprobs == 0


def test_generate_has_its_own_defaults() -> None:
    ask = read_generate({"prompt": "p"})
    assert ask.sampling == SamplingAsk(temperature=1.0, top_p=1.0, top_k=0)
    assert (ask.seq_id, ask.model) == (None, None)


NEW_FIELDS: dict[str, Any] = {
    "n": 3,
    "min_p": 0.1,
    "presence_penalty": -2,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100, "7": 2.5},
    "min_tokens": 4,
    "context_overflow": "sliding",
    "stop_token_ids": [5, 3, 5],
}


def test_every_route_reads_what_was_asked_of_sampling() -> None:
    expected = SamplingAsk(
        n=3, min_p=0.1, presence_penalty=-2.0, frequency_penalty=1.5, repetition_penalty=1.1,
        logit_bias={5: -100.0, 7: 2.5}, min_tokens=4, overflow=Overflow.SLIDING, stop_ids=(5, 3),
    )  # fmt: skip
    assert read_chat(chat(**NEW_FIELDS)).sampling == expected
    assert read_completion(completion(**NEW_FIELDS, best_of=3)).sampling == expected
    one = read_generate({"prompt": "p", **NEW_FIELDS, "n": 1}).sampling
    assert one == replace(expected, n=1, temperature=1.0, top_p=1.0, top_k=0)


def test_every_route_reads_whether_results_must_be_exact() -> None:
    for said, meant in (({}, False), ({"exact": None}, False), ({"exact": False}, False), ({"exact": True}, True)):
        for ask in (
            read_chat(chat(**said)),
            read_completion(completion(**said)),
            read_generate({"prompt": "p", **said}),
        ):
            assert ask.exact is meant


def test_log_probabilities_are_asked_for_in_each_routes_way() -> None:
    assert read_chat(chat(logprobs=True)).sampling.logprobs == 0
    assert read_chat(chat(logprobs=True, top_logprobs=20)).sampling.logprobs == 20
    assert read_chat(chat(logprobs=False, top_logprobs=0)).sampling.logprobs is None
    assert read_completion(completion(logprobs=0)).sampling.logprobs == 0
    assert read_completion(completion(logprobs=5)).sampling.logprobs == 5
    assert read_generate({"prompt": "p", "logprobs": 2}).sampling.logprobs == 2
    assert read_generate({"prompt": "p"}).sampling.logprobs is None


BUNDLE = Bundle("m", "{}", None, None, None, (1, 2), 100, 10, default_temperature=0.7, default_top_k=40)


def plan(ask: SamplingAsk, prompt_tokens: int = 40, default: int = 8) -> Sampling:
    return plan_sampling(
        ask, BUNDLE, prompt_tokens=prompt_tokens, field="prompt", default_max_tokens=default
    )  # fmt: skip


def test_sampling_takes_the_models_defaults_and_the_room_that_is_left() -> None:
    left = plan(SamplingAsk(), default=1024)
    assert (left.temperature, left.top_p, left.top_k, left.max_tokens, left.seed) == (0.7, 1.0, 40, 60, None)
    said = SamplingAsk(max_tokens=60, temperature=0.0, top_k=0, seed=9, ignore_eos=True)
    sampling = plan(said)
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.seed) == (0.0, 0, 60, 9)
    assert sampling.ignore_eos
    with pytest.raises(InvalidRequest, match=r"max_tokens: this model's maximum context length is 100 tokens.* 61"):
        plan(replace(said, max_tokens=61))


def test_what_was_asked_reaches_the_request() -> None:
    ask = read_chat(chat(**NEW_FIELDS, logprobs=True)).sampling
    assert plan(ask) == Sampling(
        max_tokens=8, temperature=0.7, top_k=40, n=3, min_p=0.1, presence_penalty=-2.0, frequency_penalty=1.5,
        repetition_penalty=1.1, logit_bias={5: -100.0, 7: 2.5}, logprobs=0, min_tokens=4, overflow=Overflow.SLIDING,
        stop_ids=(5, 3),
    )  # fmt: skip


def test_a_prompt_must_leave_room() -> None:
    assert plan(SamplingAsk(), 99).max_tokens == 1
    for overflow in (Overflow.ERROR, Overflow.TRUNCATE_GENERATION):
        with pytest.raises(InvalidRequest, match="prompt: this model's maximum context length is 100 tokens, 99 "):
            plan(SamplingAsk(overflow=overflow), 100)


@pytest.mark.parametrize(
    ("overflow", "prompt_tokens", "max_tokens", "default", "becomes"),
    [
        (Overflow.TRUNCATE_LEFT, 1000, 99, 8, 99),
        (Overflow.TRUNCATE_LEFT, 1000, 100, 8, "max_tokens"),
        (Overflow.TRUNCATE_LEFT, 1000, None, 8, 8),
        (Overflow.TRUNCATE_LEFT, 10, None, 1024, 90),  # what is left; the prompt stays whole
        (Overflow.TRUNCATE_LEFT, 95, None, 1024, 50),  # half the context, and half the prompt
        (Overflow.TRUNCATE_GENERATION, 90, 50, 8, 10),
        (Overflow.TRUNCATE_GENERATION, 90, None, 1024, 10),
        (Overflow.TRUNCATE_GENERATION, 99, 10**6, 8, 1),
        (Overflow.TRUNCATE_GENERATION, 100, 1, 8, "prompt"),
        (Overflow.SLIDING, 1000, 10**6, 8, 10**6),
        (Overflow.SLIDING, 1000, None, 1024, 1024),
        (Overflow.ERROR, 1000, 1, 8, "prompt"),
        (Overflow.ERROR, 90, 11, 8, "max_tokens"),
    ],
)
def test_what_the_context_cannot_hold_follows_the_policy(
    overflow: Overflow, prompt_tokens: int, max_tokens: int | None, default: int, becomes: int | str
) -> None:
    ask = SamplingAsk(overflow=overflow, max_tokens=max_tokens)
    if isinstance(becomes, int):
        sampling = plan(ask, prompt_tokens, default)
        assert (sampling.max_tokens, sampling.overflow) == (becomes, overflow)
        return
    with pytest.raises(ContextLengthExceeded) as error:
        plan(ask, prompt_tokens, default)
    refused(error, becomes)


def test_min_tokens_fit_into_max_tokens() -> None:
    assert plan(SamplingAsk(min_tokens=20)).max_tokens == 20  # the default gives way
    for ask in (SamplingAsk(min_tokens=5, max_tokens=4), SamplingAsk(min_tokens=61)):
        with pytest.raises(InvalidRequest) as error:
            plan(ask)
        refused(error, "min_tokens")


def test_many_tokens_are_refused_with_what_the_context_holds() -> None:
    for overflow in (Overflow.ERROR, Overflow.TRUNCATE_LEFT):
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 100 tokens") as error:
            plan(read_chat(chat(max_completion_tokens=10**9, context_overflow=overflow.value)).sampling)
        refused(error, "max_completion_tokens")
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TOKENS_LIMIT}") as bound:
        plan(SamplingAsk(max_tokens=10**9, overflow=Overflow.SLIDING))
    refused(bound, "max_tokens")


def test_a_bias_is_of_a_token_that_the_model_knows() -> None:
    assert plan(SamplingAsk(logit_bias={9: 1.0})).logit_bias == {9: 1.0}
    with pytest.raises(InvalidRequest, match=r"within \[0, 9\], got 10") as error:
        plan(SamplingAsk(logit_bias={10: 1.0}))
    refused(error, "logit_bias")
    with pytest.raises(InvalidRequest, match=r"within \[0, 9\], got 10") as error:
        plan(SamplingAsk(stop_ids=(1, 10)))
    refused(error, "stop_token_ids")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "stop",
        "n",
        "stream",
        "stream_options",
        "temperature",
        "seed",
        "tools",
        "seq_id",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "min_tokens",
        "best_of",
        "context_overflow",
        "exact",
    ]
)


@given(st.dictionaries(NAMES, JSON))
def test_whatever_a_body_holds_it_is_read_or_refused(fields: dict[str, Any]) -> None:
    for read, base in ((read_chat, chat()), (read_completion, completion()), (read_generate, {"prompt": "p"})):
        refusal: InvalidRequest | None = None
        try:
            read({**base, **fields})
        except InvalidRequest as error:
            refusal = error
        assert refusal is None or refusal.field
