"""Bodies of the generating routes as frozen dataclasses. Pure.

Unserved fields that would change the answer are refused by name unless they have the default; unknown fields too, as by
OpenAI's servers. Ignored fields describe the caller, or ask for the default. Defaults of /generate are the interface's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    StrictInt,
)
from pydantic_core import PydanticCustomError

from kvchat.conversation import Conversation
from kvfleet.ingress.requests.asks import ANYWHERE, MAX_CHOICES, Count, PlacementAsk, SamplingAsk
from kvfleet.ingress.requests.grammars import GrammarAsk
from kvproto.errors import InvalidRequest
from kvservice.fields import Body, BodyForm, Flag, Whole

MAX_MODEL_CHARS = 256
MAX_SEQ_ID_CHARS = 1024
MAX_CHAT_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5

SeqId = Annotated[str, Field(min_length=1, max_length=MAX_SEQ_ID_CHARS)]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: Flag | None = None


def _only_prompt(said: Any) -> Any:
    if type(said) is not list or not said or type(said[0]) not in (str, list):
        return said
    if len(said) > 1:
        raise PydanticCustomError("prompts", "at most 1 prompt per request, got {count}", {"count": len(said)})
    return said[0]


Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[tuple[StrictInt, ...], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[Text | Ids, Field(union_mode="left_to_right")]
OnlyPrompt = BeforeValidator(
    _only_prompt, json_schema_input_type=Text | Ids | Annotated[list[Text | Ids], Field(min_length=1, max_length=1)]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenAiAsk:
    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
    sampling: SamplingAsk
    grammars: GrammarAsk
    stream: Flag = False
    stream_options: StreamOptions | None = None
    placement: PlacementAsk = ANYWHERE
    exact: Flag = False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("only allowed when stream is true", field="stream_options")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk(_OpenAiAsk, Conversation):
    max_completion_tokens: Count | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Whole(0, MAX_CHAT_LOGPROBS)] = 0
    seq_id: SeqId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAsk(_OpenAiAsk):
    """Either `prompt` or `prompt_ids`."""

    said: Annotated[Prompt, OnlyPrompt, Field(alias="prompt")]
    logprobs: Annotated[int, Whole(0, MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: Annotated[int, Whole(1, MAX_CHOICES)] | None = None

    @property
    def prompt(self) -> str | None:
        return self.said if isinstance(self.said, str) else None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.said if isinstance(self.said, tuple) else ()


_NEVER: tuple[Any, ...] = ()
_OTHERS: dict[str, tuple[Any, ...] | None] = {
    "service_tier": ("auto", "default"),
    **dict.fromkeys(("user", "safety_identifier", "metadata", "store", "prompt_cache_key")),
    # of vLLM's servers
    "spaces_between_special_tokens": (True,),
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search", "echo"), (False,)),
    "length_penalty": (1.0,),
    "bad_words": ([],),
    **dict.fromkeys(("allowed_token_ids", "truncate_prompt_tokens", "prompt_logprobs"), _NEVER),
}
CHAT = BodyForm(
    ChatAsk,
    {
        **_OTHERS,
        **dict.fromkeys(("functions", "documents"), ([],)),
        "function_call": ("none", "auto"),
        "best_of": (1,),
        "modalities": (["text"],),
        **dict.fromkeys(("audio", "prediction", "web_search_options", "verbosity"), _NEVER),
        # of vLLM's servers
        "chat_template": _NEVER,
        "add_generation_prompt": (True,),
        **dict.fromkeys(("continue_final_message", "add_special_tokens"), (False,)),
    },
)
COMPLETION = BodyForm(CompletionAsk, {**_OTHERS, "suffix": ("",), "add_special_tokens": (True,)})


def read_chat(body: Body) -> ChatAsk:
    """Raises InvalidRequest naming the field."""
    ask = CHAT.read(body)
    if ask.top_logprobs and not ask.logprobs:
        raise InvalidRequest("only allowed when logprobs is true", field="top_logprobs")
    sampling = replace(ask.sampling, grammar=ask.grammars.grammar)
    if ask.logprobs:  # 0: the token's own alone
        sampling = replace(sampling, logprobs=ask.top_logprobs)
    if ask.max_completion_tokens is not None:
        sampling = replace(sampling, max_tokens=ask.max_completion_tokens, max_tokens_field="max_completion_tokens")
    return replace(ask, sampling=sampling)


def read_completion(body: Body) -> CompletionAsk:
    """Raises InvalidRequest naming the field."""
    ask = COMPLETION.read(body)
    n = ask.sampling.n
    if ask.best_of not in (None, 1, n):
        raise InvalidRequest(f"only n, {n}, is supported by this server, got {ask.best_of}", field="best_of")
    return replace(ask, sampling=replace(ask.sampling, logprobs=ask.logprobs, grammar=ask.grammars.grammar))


def check_vocabulary(ids: tuple[int, ...], vocab_size: int, field: str = "prompt") -> None:
    """Raises InvalidRequest naming the first unknown id."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        i = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequest(f"must be within [0, {vocab_size - 1}], got {ids[i]}", field=f"{field}[{i}]")


DEFAULT_MAX_TOKENS = 50
MAX_PROMPT_CHARS = 8_388_608


@dataclass(frozen=True, slots=True)
class GenerateAsk:
    """`seq_id` None: a new session; `model` None: the session's, else the only served one."""

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]
    sampling: SamplingAsk
    grammars: GrammarAsk
    seq_id: SeqId | None = None
    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = None
    model_name: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = None  # comes before `model`
    placement: PlacementAsk = ANYWHERE
    exact: Flag = False
    logprobs: Annotated[int, Whole(0, MAX_CHAT_LOGPROBS)] | None = None
    n: Annotated[int, Whole(1, 1)] = 1  # a session has one continuation


GENERATE = BodyForm(GenerateAsk, {"stream": (True,), "user": None, "metadata": None})


def read_generate(body: Body) -> GenerateAsk:
    """Raises InvalidRequest naming the field."""
    ask = GENERATE.read(body)
    said = ask.sampling
    sampling = replace(
        said,
        temperature=said.temperature if said.temperature is not None else 1.0,
        top_p=said.top_p if said.top_p is not None else 1.0,
        top_k=said.top_k or 0,
        logprobs=ask.logprobs,
        grammar=ask.grammars.grammar,
    )
    return replace(ask, model=ask.model_name or ask.model or None, sampling=sampling)
