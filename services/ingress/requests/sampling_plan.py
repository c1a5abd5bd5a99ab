"""Applies a caller's sampling to one prompt of one model, whose context it must fit. Pure.

`context_overflow` says whether a prompt and its `max_tokens` must fit:

    error                 both must; the context bounds the default of `max_tokens`
    truncate_left         `max_tokens` must, with one prompt token; the worker drops the oldest of the others. The
                          default drops prompt tokens for half a context at most
    truncate_generation   the prompt must, with one generated token; `max_tokens` becomes what is left
    sliding               neither must: whenever the context is full the worker drops its older half
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvfleet.ingress.requests.asks import MAX_TOKENS_LIMIT, SamplingAsk, check_tokens
from kvproto.errors import ContextLengthExceeded, InvalidRequest
from kvproto.messages import Bundle, Overflow, Sampling

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
