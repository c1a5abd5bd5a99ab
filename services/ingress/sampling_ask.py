"""What a caller said about sampling, as read from a body. Pure. What it becomes for one prompt: `sampling_plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvproto.errors import InvalidRequest
from kvproto.messages import Overflow
from services.ingress.fields import Body, boolean, expected, integer, number

MAX_TOKENS_LIMIT = 16_777_216
MAX_TEMPERATURE = 100.0
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
MAX_BIASES = 4096
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingAsk:
    """None: the caller left it to the model's defaults. `logprobs` None: the caller wants none."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_tokens_field: str = "max_tokens"  # what the caller called it
    n: int = 1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    min_tokens: int = 0
    overflow: Overflow = Overflow.ERROR


def read_sampling(body: Body, *, max_tokens_field: str = "max_tokens", logprobs: int | None = None) -> SamplingAsk:
    """The sampling fields that all routes share; how `logprobs` are asked for differs, so they come read.

    `top_k` -1 or 0 means no limit. Raises InvalidRequest.
    """
    top_k = integer(body, "top_k", -1, 2**31 - 1)
    repetition_penalty = number(body, "repetition_penalty", 0.001, 1000.0)
    return SamplingAsk(
        max_tokens=integer(body, max_tokens_field, 1, MAX_TOKENS_LIMIT),
        temperature=number(body, "temperature", 0.0, MAX_TEMPERATURE),
        top_p=number(body, "top_p", 0.0, 1.0),
        top_k=max(top_k, 0) if top_k is not None else None,
        seed=integer(body, "seed", _MIN_SEED, _MAX_SEED),
        stop=_read_stop(body),
        ignore_eos=boolean(body, "ignore_eos", False),
        max_tokens_field=max_tokens_field,
        n=integer(body, "n", 1, MAX_CHOICES) or 1,
        min_p=number(body, "min_p", 0.0, 1.0) or 0.0,
        presence_penalty=number(body, "presence_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0,
        frequency_penalty=number(body, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0,
        repetition_penalty=repetition_penalty if repetition_penalty is not None else 1.0,
        logit_bias=_read_logit_bias(body),
        logprobs=logprobs,
        min_tokens=integer(body, "min_tokens", 0, MAX_TOKENS_LIMIT) or 0,
        overflow=_read_overflow(body),
    )


def _read_stop(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    stops = [value] if type(value) is str else value
    if type(stops) is not list:
        raise expected("a string or a list of strings", value, "stop")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings, got {len(stops)}", field="stop")
    for i, one in enumerate(stops):
        name = f"stop[{i}]" if type(value) is list else "stop"
        if type(one) is not str:
            raise expected("a string", one, name)
        if not 1 <= len(one) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"must have 1 to {MAX_STOP_CHARS} characters, got {len(one)}", field=name)
    return tuple(stops)


def _read_logit_bias(body: Body) -> dict[int, float]:
    """Token ids are keys, and so text: `{"50256": -100}`. Whether the model knows them is `check_bias`'s."""
    value = body.get("logit_bias")
    if value is None:
        return {}
    if type(value) is not dict:
        raise expected("an object of token ids", value, "logit_bias")
    if len(value) > MAX_BIASES:
        raise InvalidRequest(f"at most {MAX_BIASES} token ids, got {len(value)}", field="logit_bias")
    out: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequest(f"keys must be token ids, got {key[:40]!r}", field="logit_bias")
        if type(bias) not in (int, float):
            raise expected(f"a number for token {key}", bias, "logit_bias")
        if not (math.isfinite(bias) and -MAX_BIAS <= bias <= MAX_BIAS):
            raise InvalidRequest(
                f"must be within [{-MAX_BIAS:g}, {MAX_BIAS:g}], got {bias} for token {key}", field="logit_bias"
            )
        out[int(key)] = float(bias)
    return out


def check_bias(bias: dict[int, float], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id the model does not know."""
    for token in bias:
        if token >= vocab_size:
            raise InvalidRequest(f"token ids must be within [0, {vocab_size - 1}], got {token}", field="logit_bias")


def _read_overflow(body: Body) -> Overflow:
    value = body.get("context_overflow")
    if value is None:
        return Overflow.ERROR
    if type(value) is not str:
        raise expected("a string", value, "context_overflow")
    try:
        return Overflow(value)
    except ValueError:
        known = ", ".join(one.value for one in Overflow)
        raise InvalidRequest(f"must be one of {known}, got {value[:40]!r}", field="context_overflow") from None
