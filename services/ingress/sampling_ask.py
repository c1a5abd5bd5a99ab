"""What a caller said about sampling, and what it becomes for one prompt of one model. Pure.

A `max_tokens` that the caller names and the context cannot hold is an error, as is a prompt that leaves no room at all;
where none is named, what the context leaves bounds the default.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproto.errors import ContextLengthExceeded, InvalidRequest
from kvproto.messages import Bundle, Sampling
from services.ingress.fields import Body, boolean, expected, integer, number

MAX_TOKENS_LIMIT = 16_777_216
MAX_TEMPERATURE = 100.0
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingAsk:
    """None: the caller left it to the model's defaults."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_tokens_field: str = "max_tokens"  # what the caller called it


def read_sampling(body: Body, *, max_tokens_field: str = "max_tokens") -> SamplingAsk:
    """The sampling fields that all routes share. `top_k` -1 or 0 means no limit. Raises InvalidRequest."""
    top_k = integer(body, "top_k", -1, 2**31 - 1)
    return SamplingAsk(
        max_tokens=integer(body, max_tokens_field, 1, MAX_TOKENS_LIMIT),
        temperature=number(body, "temperature", 0.0, MAX_TEMPERATURE),
        top_p=number(body, "top_p", 0.0, 1.0),
        top_k=max(top_k, 0) if top_k is not None else None,
        seed=integer(body, "seed", _MIN_SEED, _MAX_SEED),
        stop=_read_stop(body),
        ignore_eos=boolean(body, "ignore_eos", False),
        max_tokens_field=max_tokens_field,
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


def room_after(prompt_tokens: int, context_length: int, field: str) -> int:
    """Tokens that may be generated after a prompt. Raises ContextLengthExceeded when there is no room for one."""
    if prompt_tokens >= context_length:
        raise ContextLengthExceeded(
            f"{prompt_tokens} tokens, the model's context takes at most {context_length - 1} and one to generate",
            field=field,
        )
    return context_length - prompt_tokens


def resolve(ask: SamplingAsk, bundle: Bundle, *, room: int, default_max_tokens: int, seed: int) -> Sampling:
    """The request's sampling: said by the caller, else by the model's generation defaults, else neutral.

    The model's own stop tokens are the worker's business, unless `ignore_eos` tells it otherwise. Raises
    ContextLengthExceeded for a `max_tokens` beyond `room`.
    """
    if ask.max_tokens is not None and ask.max_tokens > room:
        raise ContextLengthExceeded(
            f"{ask.max_tokens} is more than the {room} tokens that the context of {bundle.context_length} leaves after "
            "the prompt",
            field=ask.max_tokens_field,
        )
    temperature = _first(ask.temperature, bundle.default_temperature, 1.0)
    top_p = _first(ask.top_p, bundle.default_top_p, 1.0)
    top_k = ask.top_k if ask.top_k is not None else (bundle.default_top_k or 0)
    return Sampling(
        max_tokens=ask.max_tokens if ask.max_tokens is not None else min(default_max_tokens, room),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=ask.seed if ask.seed is not None else seed,
        stop=ask.stop,
        ignore_eos=ask.ignore_eos,
    )


def _first(said: float | None, default: float | None, neutral: float) -> float:
    return said if said is not None else default if default is not None else neutral
