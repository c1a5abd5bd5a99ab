"""Bodies of the generating routes as frozen dataclasses. Pure.

Unserved fields that would change the answer are refused by name unless they have the default; unknown fields too, as by
OpenAI's servers. Ignored fields describe the caller, or ask for the default. Defaults of /generate are the interface's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Discriminator, Field, StrictInt, Tag

from kvchat.conversation import Conversation
from kvfleet.ingress.requests.asks import ANY_COUNT, ANYWHERE, Count, FleetAsk, PlacementAsk, SamplingAsk
from kvfleet.ingress.requests.beams import NO_BEAMS, BeamAsk
from kvfleet.ingress.requests.grammars import GrammarAsk
from kvproto.errors import InvalidRequest
from kvproto.messages import Overflow
from kvservice.fields import Body, BodyForm, Flag, Made, Whole

MAX_MODEL_CHARS = 256
MAX_SEQ_ID_CHARS = 1024
MAX_CHAT_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_PROMPT_LOGPROBS = 20
MAX_PROMPTS = 128
MAX_BATCH_CHOICES = 1024

SeqId = Annotated[str, Field(min_length=1, max_length=MAX_SEQ_ID_CHARS)]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: Flag | None = None


def _kind_of_prompt(said: Any) -> str:
    if isinstance(said, list | tuple):
        return "several prompts" if said and type(said[0]) in (str, list) else "token ids"
    return "a text"


Prompt = str | tuple[int, ...]
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[tuple[StrictInt, ...], Field(min_length=1, fail_fast=True)]
OnePrompt = Annotated[Text | Ids, Field(union_mode="left_to_right")]
Several = Annotated[tuple[OnePrompt, ...], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Prompts = Made(
    Annotated[
        Annotated[Text, Tag("a text")] | Annotated[Ids, Tag("token ids")] | Annotated[Several, Tag("several prompts")],
        Discriminator(_kind_of_prompt),
    ],
    lambda said: said if _kind_of_prompt(said) == "several prompts" or isinstance(said[0], tuple) else (said,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenAiAsk:
    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
    sampling: SamplingAsk
    grammars: GrammarAsk
    beams: BeamAsk = NO_BEAMS
    stream: Flag = False
    stream_options: StreamOptions | None = None
    placement: PlacementAsk = ANYWHERE
    exact: Flag = False
    prompt_logprobs: Annotated[int, Whole(0, MAX_PROMPT_LOGPROBS)] | None = None
    return_token_ids: Flag = False
    kvfleet: FleetAsk | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("only allowed when stream is true", field="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("not available when stream is true", field="prompt_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk(_OpenAiAsk, Conversation):
    max_completion_tokens: Count | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Whole(0, MAX_CHAT_LOGPROBS)] = 0
    seq_id: SeqId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAsk(_OpenAiAsk):
    """A run for each prompt. With `echo` each answer begins with its prompt, and may have no more than that."""

    prompts: Annotated[tuple[Prompt, ...], Prompts, Field(alias="prompt")]
    max_tokens: Annotated[int, Whole(0, ANY_COUNT)] | None = None
    echo: Flag = False
    logprobs: Annotated[int, Whole(0, MAX_COMPLETION_LOGPROBS)] | None = None

    @property
    def echoed_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


_NEVER: tuple[Any, ...] = ()
_OTHERS: dict[str, tuple[Any, ...] | None] = {
    "service_tier": ("auto", "default"),
    **dict.fromkeys(("user", "safety_identifier", "metadata", "store", "prompt_cache_key")),
    # of vLLM's servers
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    **dict.fromkeys(("allowed_token_ids", "truncate_prompt_tokens"), _NEVER),
}
CHAT = BodyForm(
    ChatAsk,
    {
        **_OTHERS,
        **dict.fromkeys(("functions", "documents"), ([],)),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        **dict.fromkeys(("audio", "prediction", "web_search_options", "verbosity"), _NEVER),
        # of vLLM's servers
        "chat_template": _NEVER,
        "add_generation_prompt": (True,),
        **dict.fromkeys(("continue_final_message", "add_special_tokens", "echo"), (False,)),
    },
)
COMPLETION = BodyForm(CompletionAsk, {**_OTHERS, "suffix": ("",), "add_special_tokens": (True,)})


def read_chat(body: Body) -> ChatAsk:
    """Raises InvalidRequest naming the field."""
    ask = CHAT.read(body)
    if ask.top_logprobs and not ask.logprobs:
        raise InvalidRequest("only allowed when logprobs is true", field="top_logprobs")
    sampling = replace(_scoring(ask.sampling, ask.prompt_logprobs), grammar=ask.grammars.grammar)
    if ask.logprobs:  # 0: the token's own alone
        sampling = replace(sampling, logprobs=ask.top_logprobs)
    if ask.max_completion_tokens is not None:
        sampling = replace(sampling, max_tokens=ask.max_completion_tokens, max_tokens_field="max_completion_tokens")
    return replace(ask, sampling=ask.beams.bind(sampling))


def read_completion(body: Body) -> CompletionAsk:
    """Raises InvalidRequest naming the field."""
    ask = COMPLETION.read(body)
    if ask.max_tokens == 0 and not ask.echo:
        raise InvalidRequest("must be at least 1 unless echo is true, got 0", field="max_tokens")
    if ask.beams.use_beam_search and ask.echoed_logprobs is not None:
        raise InvalidRequest("not available with use_beam_search and logprobs", field="echo")
    asked = [one for one in (ask.prompt_logprobs, ask.echoed_logprobs) if one is not None]
    sampling = _scoring(ask.sampling, max(asked, default=None))
    grammar = ask.grammars.grammar
    sampling = replace(sampling, max_tokens=ask.max_tokens, logprobs=ask.logprobs, grammar=grammar)
    sampling, prompts = ask.beams.bind(sampling), len(ask.prompts)
    if sampling.at_once * prompts > MAX_BATCH_CHOICES:
        why = f"at most {MAX_BATCH_CHOICES} choices or beams of all prompts, got {sampling.at_once} of {prompts} each"
        raise InvalidRequest(why, field="n")
    return replace(ask, sampling=sampling)


def _scoring(sampling: SamplingAsk, alternatives: int | None) -> SamplingAsk:
    if alternatives is not None and sampling.overflow in (Overflow.TRUNCATE_LEFT, Overflow.SLIDING):
        why = "the whole prompt's log probabilities are asked for, so nothing of it may be dropped"
        raise InvalidRequest(why, field="context_overflow")
    return replace(sampling, prompt_logprobs=alternatives)


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
    beams: BeamAsk = NO_BEAMS
    seq_id: SeqId | None = None
    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = None
    model_name: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = None  # comes before `model`
    placement: PlacementAsk = ANYWHERE
    exact: Flag = False
    logprobs: Annotated[int, Whole(0, MAX_CHAT_LOGPROBS)] | None = None
    n: Annotated[int, Whole(1, 1)] = 1  # a session has one continuation
    kvfleet: FleetAsk | None = None


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
    return replace(ask, model=ask.model_name or ask.model or None, sampling=ask.beams.bind(sampling))
