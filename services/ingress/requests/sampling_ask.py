"""What a caller said about sampling, as read from a body. Pure. What it becomes for one prompt: `sampling_plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kvfleet.ingress.requests.fields import Body, BodyField, Schema, boolean, expected, integer, number
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
ANY_COUNT = 2**53 - 1  # what a model's context leaves is said where it is known
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
    stop_ids: tuple[int, ...] = ()
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


def _read_stop_ids(value: Any, name: str) -> tuple[int, ...]:
    """Whether the model knows them is `check_tokens`'s."""
    if type(value) is not list:
        raise expected("a list of token ids", value, name)
    if len(value) > MAX_STOP_IDS:
        raise InvalidRequest(f"at most {MAX_STOP_IDS} token ids, got {len(value)}", field=name)
    for i, token in enumerate(value):
        if type(token) is not int:
            raise expected("a token id", token, f"{name}[{i}]")
        if not 0 <= token < 2**31:
            raise InvalidRequest(f"must be a token id, got {token}", field=f"{name}[{i}]")
    return tuple(dict.fromkeys(value))


def _read_logit_bias(value: Any, name: str) -> dict[int, float]:
    """Token ids are keys, and so text: `{"50256": -100}`. Whether the model knows them is `check_tokens`'s."""
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
_STOP_IDS: Schema = {
    "type": "array",
    "maxItems": MAX_STOP_IDS,
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
}
_BIAS: Schema = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,19}$"},
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
}


class SamplingFields:
    """Those that all routes share; how `logprobs` are asked for differs, and what bounds `n`."""

    max_tokens = integer("max_tokens", 1, ANY_COUNT)
    temperature = number("temperature", 0.0, MAX_TEMPERATURE)
    top_p = number("top_p", 0.0, 1.0)
    top_k = integer("top_k", -1, 2**31 - 1)
    seed = integer("seed", _MIN_SEED, _MAX_SEED)
    stop = BodyField("stop", {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}]}, _read_stop)
    stop_token_ids = BodyField("stop_token_ids", _STOP_IDS, _read_stop_ids)
    ignore_eos = boolean("ignore_eos")
    n = integer("n", 1, MAX_CHOICES)
    min_p = number("min_p", 0.0, 1.0)
    presence_penalty = number("presence_penalty", -MAX_PENALTY, MAX_PENALTY)
    frequency_penalty = number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY)
    repetition_penalty = number("repetition_penalty", 0.001, 1000.0)
    logit_bias = BodyField("logit_bias", _BIAS, _read_logit_bias)
    min_tokens = integer("min_tokens", 0, ANY_COUNT)
    context_overflow = BodyField(
        "context_overflow", {"type": "string", "enum": [one.value for one in Overflow]}, _read_overflow
    )


def read_sampling(
    body: Body, *, limit: BodyField[int] = SamplingFields.max_tokens, logprobs: int | None = None
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
        stop_ids=fields.stop_token_ids.read(body, ()),
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


def check_tokens(ask: SamplingAsk, vocab_size: int) -> None:
    """Raises InvalidRequest naming the field with the first id that the model does not know."""
    for field_name, tokens in (("logit_bias", ask.logit_bias), ("stop_token_ids", ask.stop_ids)):
        for token in tokens:
            if token >= vocab_size:
                raise InvalidRequest(f"token ids must be within [0, {vocab_size - 1}], got {token}", field=field_name)
