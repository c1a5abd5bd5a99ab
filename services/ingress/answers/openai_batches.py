"""Completions of several prompts as one answer: choices in the order of prompts, usage summed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from kvfleet.ingress.answers.openai_answers import (
    BatchNote,
    CachedTokens,
    CompletionAnswer,
    ReasoningTokens,
    Usage,
    fleet_note,
    usage_of,
)
from kvfleet.ingress.answers.openai_events import DONE, OpenAiForm
from kvfleet.ingress.runs.transcript import Transcript

Told = Sequence[tuple[OpenAiForm, Transcript]]  # of each prompt


def batch_body(told: Told) -> bytes:
    form = told[0][0]
    choices: list[Any] = [choice for one, transcript in told for choice in one.choices_of(transcript)[0]]
    return orjson.dumps(
        CompletionAnswer(**form.as_map(chunk=False), choices=choices, usage=_usage(told), kvfleet=_note(told))
    )


def batch_end(told: Told) -> bytes:
    """What follows the events of all prompts."""
    form = told[0][0]
    if not form.include_usage:
        return DONE
    last = {**form.as_map(chunk=True), "choices": (), "usage": _usage(told), "kvfleet": _note(told)}
    return b"data: %b\n\n" % orjson.dumps(last) + DONE


def _usage(told: Told) -> Usage:
    each = [usage_of(end, one) for _, one in told if (end := one.finished) is not None]
    prompt, generated = sum(one.prompt_tokens for one in each), sum(one.completion_tokens for one in each)
    cached = CachedTokens(sum(one.prompt_tokens_details.cached_tokens for one in each))
    return Usage(prompt, generated, prompt + generated, cached, ReasoningTokens(0))


def _note(told: Told) -> BatchNote:
    notes = [fleet_note(form.request, end, one) for form, one in told if (end := one.finished) is not None]
    return BatchNote(told[0][0].request, notes)
