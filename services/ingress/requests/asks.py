"""Fields of a body about sampling and placement, and the sampling of one prompt that follows from them. Pure. Only
placement knows which policies exist.

`context_overflow` says whether a prompt and its `max_tokens` must fit the context:

    error                 both must; the context bounds the default of `max_tokens`
    truncate_left         `max_tokens` must, with one prompt token; the worker drops the oldest of the others. The
                          default drops prompt tokens for half a context at most
    truncate_generation   the prompt must, with one generated token; `max_tokens` becomes what is left
    sliding               neither must: whenever the context is full the worker drops its older half
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from kvproto.errors import ContextLengthExceeded, InvalidRequest
from kvproto.messages import Beams, Bundle, Grammar, Overflow, Sampling
from kvservice.fields import Flag, Made, Number, Whole

MAX_TOKENS_LIMIT = 16_777_216  # where no context bounds them
MAX_TEMPERATURE = 2.0
MAX_STOP_IDS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
MAX_BIASES = 4096
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
ANY_COUNT = 2**53 - 1  # `plan_sampling` knows what the model's context leaves
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1

Count = Annotated[int, Whole(1, ANY_COUNT)]
Share = Annotated[Number, Field(ge=0, le=1)]
Penalty = Annotated[Number, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,19}$")]
Bias = Annotated[Number, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Stops = Made(Stop | Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS, fail_fast=True)],
             lambda said: (said,) if isinstance(said, str) else said)  # fmt: skip
Biases = Made(
    Annotated[dict[TokenKey, Bias], Field(max_length=MAX_BIASES, fail_fast=True)],
    lambda said: {int(token): bias for token, bias in said.items()},
)


@dataclass(frozen=True, slots=True)
class SamplingAsk:
    """None: the model's default. `logprobs` None: the caller wants none; each route reads them, `prompt_logprobs`, a
    `grammar` and `beams` in its own way."""

    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Whole(-1, 2**31 - 1), AfterValidator(lambda said: max(said, 0))] | None = None  # 0: no limit
    seed: Annotated[int, Whole(_MIN_SEED, _MAX_SEED)] | None = None
    stop: Annotated[tuple[str, ...], Stops] = ()
    stop_ids: Annotated[
        tuple[StopId, ...],
        Field(alias="stop_token_ids", max_length=MAX_STOP_IDS, fail_fast=True),
        AfterValidator(lambda said: tuple(dict.fromkeys(said))),
    ] = ()
    ignore_eos: Flag = False
    max_tokens_field: SkipJsonSchema[str] = "max_tokens"  # what the caller called it
    n: Annotated[int, Whole(1, MAX_CHOICES)] = 1
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[Number, Field(ge=0.001, le=1000)] = 1.0
    logit_bias: Annotated[dict[int, float], Biases] = field(default_factory=dict)
    logprobs: SkipJsonSchema[int | None] = None
    prompt_logprobs: SkipJsonSchema[int | None] = None
    grammar: SkipJsonSchema[Grammar | None] = None
    beams: SkipJsonSchema[Beams | None] = None
    min_tokens: Annotated[int, Whole(0, ANY_COUNT)] = 0
    overflow: Annotated[Overflow, Field(alias="context_overflow")] = Overflow.ERROR
    skip_special_tokens: Flag = True

    @property
    def at_once(self) -> int:
        """How many sequences it runs."""
        return self.n if self.beams is None else self.beams.width


def check_tokens(ask: SamplingAsk, vocab_size: int) -> None:
    """Raises InvalidRequest naming the field with the first unknown id."""
    for field_name, tokens in (("logit_bias", ask.logit_bias), ("stop_token_ids", ask.stop_ids)):
        for token in tokens:
            if token >= vocab_size:
                raise InvalidRequest(f"token ids must be within [0, {vocab_size - 1}], got {token}", field=field_name)


DIRECT = "direct"
MAX_NAME_CHARS = 64
MAX_PRIORITY = 100

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


@dataclass(frozen=True, slots=True)
class PlacementAsk:
    """None: the fleet decides. Raises InvalidRequest for a worker without the policy `direct`, and the reverse."""

    policy: Name | None = None
    worker: Name | None = None
    priority: Annotated[int, Whole(-MAX_PRIORITY, MAX_PRIORITY)] | None = None  # positive is served first

    def __post_init__(self) -> None:
        if self.worker is not None and self.policy is None:
            object.__setattr__(self, "policy", DIRECT)
        if self.worker is not None and self.policy != DIRECT:
            raise InvalidRequest(f"only the policy {DIRECT} takes one, got the policy {self.policy!r}", field="worker")
        if self.worker is None and self.policy == DIRECT:
            raise InvalidRequest(f"missing: the policy {DIRECT} needs one", field="worker")


ANYWHERE = PlacementAsk()
MAX_RETURN_S = 86_400


@dataclass(frozen=True, slots=True)
class FleetAsk:
    """What a caller says to the fleet alone, in the field `kvfleet`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    expect_return_s: Annotated[Number, Field(ge=0, le=MAX_RETURN_S)] | None = (
        None  # until this conversation's next turn
    )


def return_of(said: FleetAsk | None) -> float | None:
    return None if said is None else said.expect_return_s


_SAID = tuple(one.name for one in fields(SamplingAsk) if one.name in Sampling.__dataclass_fields__)


def prompt_must_fit(overflow: Overflow) -> bool:
    return overflow in (Overflow.ERROR, Overflow.TRUNCATE_GENERATION)


def plan_sampling(
    ask: SamplingAsk, bundle: Bundle, *, prompt_tokens: int, field: str, default_max_tokens: int
) -> Sampling:
    """The caller's sampling, else the model's generation defaults, else neutral. An absent seed stays absent:
    `kvproto.Client` derives it from the request's id, so that a repeat draws the same tokens anywhere.

    Raises ContextLengthExceeded naming `field` (the prompt's) or the caller's `max_tokens`, InvalidRequest for an
    unknown token and for `min_tokens` beyond `max_tokens`.
    """
    check_tokens(ask, bundle.vocab_size)
    said: dict[str, Any] = {name: getattr(ask, name) for name in _SAID}
    said["max_tokens"] = _max_tokens(ask, bundle.context_length, prompt_tokens, field, default_max_tokens)
    said["temperature"] = _first(ask.temperature, bundle.default_temperature, 1.0)
    said["top_p"] = _first(ask.top_p, bundle.default_top_p, 1.0)
    said["top_k"] = ask.top_k if ask.top_k is not None else (bundle.default_top_k or 0)
    return Sampling(**said)


def _max_tokens(ask: SamplingAsk, context: int, prompt_tokens: int, field: str, default: int) -> int:
    wanted = ask.max_tokens if ask.max_tokens is not None else max(default, ask.min_tokens)
    if ask.min_tokens > wanted:
        raise InvalidRequest(f"{ask.min_tokens} is more than {ask.max_tokens_field}, {wanted}", field="min_tokens")
    if ask.overflow is Overflow.SLIDING:
        if wanted > MAX_TOKENS_LIMIT:
            raise InvalidRequest(f"at most {MAX_TOKENS_LIMIT}, got {wanted}", field=ask.max_tokens_field)
        return wanted
    if ask.overflow is Overflow.TRUNCATE_LEFT:
        room, beside = context - 1, "one token of the prompt"
        if ask.max_tokens is None and ask.min_tokens <= room:
            return max(min(wanted, max(context - prompt_tokens, context // 2)), ask.min_tokens, 1)
    else:
        if prompt_tokens >= context:
            raise prompt_too_long(context, f"{prompt_tokens}", field)
        room, beside = context - prompt_tokens, f"a prompt of {prompt_tokens}"
    if wanted <= room or ask.overflow is Overflow.TRUNCATE_GENERATION:
        return min(wanted, room)
    for name, count in ((ask.max_tokens_field, ask.max_tokens), ("min_tokens", ask.min_tokens)):
        if count is not None and count > room:
            raise _context_exceeded(context, f"which leaves {room} beside {beside}, got {count}", name)
    return room


def prompt_too_long(context: int, tokens: str, field: str) -> ContextLengthExceeded:
    return _context_exceeded(context, f"{context - 1} of a prompt and one to generate, got {tokens}", field)


def _context_exceeded(context: int, why: str, field: str) -> ContextLengthExceeded:
    """In the words by which OpenAI's clients recognise it."""
    return ContextLengthExceeded(f"this model's maximum context length is {context} tokens, {why}", field=field)


def _first(said: float | None, default: float | None, neutral: float) -> float:
    return said if said is not None else default if default is not None else neutral
