"""Fields of a body about sampling and placement. Pure. `sampling_plan` applies them to one prompt; only placement knows
which policies exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic.json_schema import SkipJsonSchema

from kvfleet.ingress.requests.fields import Flag, Made, Number, Whole
from kvproto.errors import InvalidRequest
from kvproto.messages import Overflow

MAX_TOKENS_LIMIT = 16_777_216  # where no context bounds them
MAX_TEMPERATURE = 2.0
MAX_STOP_IDS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
MAX_BIASES = 4096
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
ANY_COUNT = 2**53 - 1  # `sampling_plan` knows what the model's context leaves
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
    """None: the model's default. `logprobs` None: the caller wants none; each route reads them in its own way."""

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
    min_tokens: Annotated[int, Whole(0, ANY_COUNT)] = 0
    overflow: Annotated[Overflow, Field(alias="context_overflow")] = Overflow.ERROR


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
