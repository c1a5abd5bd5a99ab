"""What a caller's sampling becomes for one prompt of one model, and whether it fits the context. Pure.

Whether a prompt and its `max_tokens` must fit is the caller's `context_overflow`:

    error                 both must; where no `max_tokens` is named, what the context leaves bounds the default
    truncate_left         `max_tokens` must, with one prompt token; the worker drops the oldest of the others. Where
                          none is named, the default drops prompt tokens for half a context at most
    truncate_generation   the prompt must, with one generated token; `max_tokens` becomes what is left
    sliding               neither must: whenever the context is full the worker drops its older half
"""

from __future__ import annotations

from kvproto.errors import ContextLengthExceeded, InvalidRequest
from kvproto.messages import Bundle, Overflow, Sampling
from services.ingress.sampling_ask import SamplingAsk, check_bias


def prompt_must_fit(overflow: Overflow) -> bool:
    """Whether a prompt that the context cannot hold is refused."""
    return overflow in (Overflow.ERROR, Overflow.TRUNCATE_GENERATION)


def plan_sampling(
    ask: SamplingAsk, bundle: Bundle, *, prompt_tokens: int, field: str, default_max_tokens: int
) -> Sampling:
    """The request's sampling: said by the caller, else by the model's generation defaults, else neutral. A seed that
    nobody said is the client's to derive from the request's id, so that a repeat draws the same tokens anywhere.

    The model's own stop tokens are the worker's business, unless `ignore_eos` tells it otherwise. Raises
    ContextLengthExceeded naming `field` (the prompt's) or the caller's `max_tokens`, InvalidRequest for a bias of a
    token that the model does not know and for `min_tokens` beyond `max_tokens`.
    """
    check_bias(ask.logit_bias, bundle.vocab_size)
    return Sampling(
        max_tokens=_max_tokens(ask, bundle.context_length, prompt_tokens, field, default_max_tokens),
        temperature=_first(ask.temperature, bundle.default_temperature, 1.0),
        top_p=_first(ask.top_p, bundle.default_top_p, 1.0),
        top_k=ask.top_k if ask.top_k is not None else (bundle.default_top_k or 0),
        seed=ask.seed,
        stop=ask.stop,
        ignore_eos=ask.ignore_eos,
        n=ask.n,
        min_p=ask.min_p,
        presence_penalty=ask.presence_penalty,
        frequency_penalty=ask.frequency_penalty,
        repetition_penalty=ask.repetition_penalty,
        logit_bias=ask.logit_bias,
        logprobs=ask.logprobs,
        min_tokens=ask.min_tokens,
        overflow=ask.overflow,
    )


def _max_tokens(ask: SamplingAsk, context: int, prompt_tokens: int, field: str, default: int) -> int:
    wanted = ask.max_tokens if ask.max_tokens is not None else max(default, ask.min_tokens)
    if ask.min_tokens > wanted:
        raise InvalidRequest(f"{ask.min_tokens} is more than {ask.max_tokens_field}, {wanted}", field="min_tokens")
    if ask.overflow is Overflow.SLIDING:
        return wanted
    if ask.overflow is Overflow.TRUNCATE_LEFT:
        room, why = context - 1, f"the context of {context} leaves beside one token of the prompt"
        if ask.max_tokens is None and ask.min_tokens <= room:
            return max(min(wanted, max(context - prompt_tokens, context // 2)), ask.min_tokens, 1)
    else:
        if prompt_tokens >= context:
            raise ContextLengthExceeded(
                f"{prompt_tokens} tokens, the model's context takes at most {context - 1} and one to generate",
                field=field,
            )
        room, why = context - prompt_tokens, f"the context of {context} leaves after the prompt"
    if wanted <= room or ask.overflow is Overflow.TRUNCATE_GENERATION:
        return min(wanted, room)
    if ask.max_tokens is not None:
        raise ContextLengthExceeded(f"{wanted} is more than the {room} tokens that {why}", field=ask.max_tokens_field)
    if ask.min_tokens > room:
        raise ContextLengthExceeded(f"{ask.min_tokens} is more than the {room} tokens that {why}", field="min_tokens")
    return room


def _first(said: float | None, default: float | None, neutral: float) -> float:
    return said if said is not None else default if default is not None else neutral
