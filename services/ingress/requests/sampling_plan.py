"""What a caller's sampling becomes for one prompt of one model, and whether it fits the context. Pure.

Whether a prompt and its `max_tokens` must fit is the caller's `context_overflow`:

    error                 both must; where no `max_tokens` is named, what the context leaves bounds the default
    truncate_left         `max_tokens` must, with one prompt token; the worker drops the oldest of the others. Where
                          none is named, the default drops prompt tokens for half a context at most
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
    """The request's sampling: said by the caller, else by the model's generation defaults, else neutral. A seed that
    nobody said is the client's to derive from the request's id, so that a repeat draws the same tokens anywhere.

    The model's own stop tokens are the worker's business, unless `ignore_eos` tells it otherwise. Raises
    ContextLengthExceeded naming `field` (the prompt's) or the caller's `max_tokens`, InvalidRequest for a token that
    the model does not know and for `min_tokens` beyond `max_tokens`.
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
    """For a prompt of so many `tokens`, or at least so many."""
    return _context_exceeded(context, f"{context - 1} of a prompt and one to generate, got {tokens}", field)


def _context_exceeded(context: int, why: str, field: str) -> ContextLengthExceeded:
    """In the words by which OpenAI's clients, and what stands on them, know it from other refusals."""
    return ContextLengthExceeded(f"this model's maximum context length is {context} tokens, {why}", field=field)


def _first(said: float | None, default: float | None, neutral: float) -> float:
    return said if said is not None else default if default is not None else neutral
