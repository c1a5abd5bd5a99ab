"""What a caller said about sampling, as read from a body. Pure. What it becomes for one prompt: `sampling_plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kvproto.errors import InvalidRequest
from kvproto.messages import Overflow
from services.ingress.fields import Body, Field, Schema, boolean, expected, integer, number

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


def _read_stop(value: Any, name: str) -> tuple[str, ...]:
    stops = [value] if type(value) is str else value
    if type(stops) is not list:
        raise expected("a string or a list of strings", value, name)
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings, got {len(stops)}", field=name)
    for i, one in enumerate(stops):
        where = f"{name}[{i}]" if type(value) is list else name
        if type(one) is not str:
            raise expected("a string", one, where)
        if not 1 <= len(one) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"must have 1 to {MAX_STOP_CHARS} characters, got {len(one)}", field=where)
    return tuple(stops)


def _read_logit_bias(value: Any, name: str) -> dict[int, float]:
    """Token ids are keys, and so text: `{"50256": -100}`. Whether the model knows them is `check_bias`'s."""
    if type(value) is not dict:
        raise expected("an object of token ids", value, name)
    if len(value) > MAX_BIASES:
        raise InvalidRequest(f"at most {MAX_BIASES} token ids, got {len(value)}", field=name)
    out: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequest(f"keys must be token ids, got {key[:40]!r}", field=name)
        if type(bias) not in (int, float):
            raise expected(f"a number for token {key}", bias, name)
        if not (math.isfinite(bias) and -MAX_BIAS <= bias <= MAX_BIAS):
            raise InvalidRequest(
                f"must be within [{-MAX_BIAS:g}, {MAX_BIAS:g}], got {bias} for token {key}", field=name
            )
        out[int(key)] = float(bias)
    return out


def _read_overflow(value: Any, name: str) -> Overflow:
    if type(value) is not str:
        raise expected("a string", value, name)
    try:
        return Overflow(value)
    except ValueError:
        known = ", ".join(one.value for one in Overflow)
        raise InvalidRequest(f"must be one of {known}, got {value[:40]!r}", field=name) from None


_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_BIAS: Schema = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,19}$"},
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
}


class SamplingFields:
    """Those that all routes share; how `logprobs` are asked for differs, and what bounds `n`."""

    max_tokens = integer("max_tokens", 1, MAX_TOKENS_LIMIT)
    temperature = number("temperature", 0.0, MAX_TEMPERATURE)
    top_p = number("top_p", 0.0, 1.0)
    top_k = integer("top_k", -1, 2**31 - 1)
    seed = integer("seed", _MIN_SEED, _MAX_SEED)
    stop = Field("stop", {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}]}, _read_stop)
    ignore_eos = boolean("ignore_eos")
    n = integer("n", 1, MAX_CHOICES)
    min_p = number("min_p", 0.0, 1.0)
    presence_penalty = number("presence_penalty", -MAX_PENALTY, MAX_PENALTY)
    frequency_penalty = number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY)
    repetition_penalty = number("repetition_penalty", 0.001, 1000.0)
    logit_bias = Field("logit_bias", _BIAS, _read_logit_bias)
    min_tokens = integer("min_tokens", 0, MAX_TOKENS_LIMIT)
    context_overflow = Field(
        "context_overflow", {"type": "string", "enum": [one.value for one in Overflow]}, _read_overflow
    )


def read_sampling(
    body: Body, *, limit: Field[int] = SamplingFields.max_tokens, logprobs: int | None = None
) -> SamplingAsk:
    """The sampling fields that all routes share. `limit` is what the caller calls `max_tokens`; `logprobs` come read.

    `top_k` -1 or 0 means no limit. Raises InvalidRequest.
    """
    fields = SamplingFields
    top_k = fields.top_k.read(body)
    max_tokens = fields.max_tokens.read(body)
    return SamplingAsk(
        max_tokens=max_tokens if limit is fields.max_tokens else limit.read(body),
        temperature=fields.temperature.read(body),
        top_p=fields.top_p.read(body),
        top_k=max(top_k, 0) if top_k is not None else None,
        seed=fields.seed.read(body),
        stop=fields.stop.read(body, ()),
        ignore_eos=fields.ignore_eos.read(body, False),
        max_tokens_field=limit.name,
        n=fields.n.read(body, 1),
        min_p=fields.min_p.read(body, 0.0),
        presence_penalty=fields.presence_penalty.read(body, 0.0),
        frequency_penalty=fields.frequency_penalty.read(body, 0.0),
        repetition_penalty=fields.repetition_penalty.read(body, 1.0),
        logit_bias=fields.logit_bias.read(body, {}),
        logprobs=logprobs,
        min_tokens=fields.min_tokens.read(body, 0),
        overflow=fields.context_overflow.read(body, Overflow.ERROR),
    )


def check_bias(bias: dict[int, float], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id the model does not know."""
    for token in bias:
        if token >= vocab_size:
            raise InvalidRequest(f"token ids must be within [0, {vocab_size - 1}], got {token}", field="logit_bias")
