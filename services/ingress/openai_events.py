"""OpenAI's answers as bytes: chunks of a stream and whole bodies, for chat and for completions. Pure.

A request's chunk is built once, as the bytes before and after the piece of text; a token then costs one escaped string
and two appends. What the fleet knows beyond OpenAI's form stands in a `kvfleet` object that clients ignore.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from kvproto.errors import KvfleetError
from kvproto.messages import Finished, Started, Tokens
from services.ingress.error_bodies import error_body
from services.ingress.sse import Transcript

DONE = b"data: [DONE]\n\n"
_MARK = "\x00text\x00"  # stands for the text while a template is cut
_MARK_JSON = orjson.dumps(_MARK)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk and body of one answer repeats. `id` is `chatcmpl-<request>` or `cmpl-<request>`."""

    request: str
    model: str
    created: int
    fingerprint: str
    chat: bool

    def as_map(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        prefix = "chatcmpl-" if self.chat else "cmpl-"
        return {
            "id": prefix + self.request,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage_map(finished: Finished, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.output_tokens,
        "total_tokens": finished.prompt_tokens + finished.output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def cached_tokens(transcript: Transcript) -> int:
    """What the first attempt found: a later one, after a lost worker, says nothing about reuse."""
    if transcript.started is not None:
        return transcript.started.cached_tokens
    return transcript.finished.cached_tokens if transcript.finished is not None else 0


def fleet_map(request: str, finished: Finished, transcript: Transcript) -> dict[str, Any]:
    return {
        "request_id": request,
        "worker_id": finished.worker or (transcript.started.worker if transcript.started else ""),
        "cached_tokens": cached_tokens(transcript),
        "queue_s": round(transcript.started.queue_s, 6) if transcript.started else None,
    }


def answer_body(head: AnswerHead, transcript: Transcript) -> bytes:
    """The whole answer of a request that does not stream."""
    finished = transcript.finished
    assert finished is not None
    text = transcript.text
    content: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
    choice = {
        "index": 0,
        **(content if head.chat else {"text": text}),
        "logprobs": None,
        "finish_reason": finished.reason.value,
    }
    return orjson.dumps(
        {
            **head.as_map(chunk=False),
            "choices": [choice],
            "usage": usage_map(finished, cached_tokens(transcript)),
            "kvfleet": fleet_map(head.request, finished, transcript),
        }
    )


class OpenAiEvents:
    """Writer of one stream. With `include_usage` every chunk has `usage: null`; a last one, without choices, has it."""

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        template = self._chunk({"content": _MARK} if head.chat else _MARK)
        self._before, _, self._after = template.rpartition(_MARK_JSON)  # nothing of the caller's stands behind it

    def _chunk(self, delta: Any, *, finish: str | None = None, **extra: Any) -> bytes:
        choice = {"index": 0, "delta" if self._head.chat else "text": delta, "logprobs": None, "finish_reason": finish}
        value = {**self._head.as_map(chunk=True), "choices": [choice], **extra}
        if self._include_usage:
            value["usage"] = None
        return b"data: " + orjson.dumps(value) + b"\n\n"

    def started(self, started: Started, out: list[bytes]) -> None:
        if self._head.chat:
            out.append(self._chunk({"role": "assistant", "content": ""}))

    def tokens(self, tokens: Tokens, out: list[bytes], dumps: Any = orjson.dumps) -> None:
        for piece in tokens.text:
            if piece:  # empty: held back, it comes with a later token
                out += (self._before, dumps(piece), self._after)

    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None:
        fleet = fleet_map(self._head.request, finished, transcript)
        out.append(self._chunk({} if self._head.chat else "", finish=finished.reason.value, kvfleet=fleet))
        if self._include_usage:
            usage = usage_map(finished, cached_tokens(transcript))
            value = {**self._head.as_map(chunk=True), "choices": [], "usage": usage, "kvfleet": fleet}
            out.append(b"data: " + orjson.dumps(value) + b"\n\n")
        out.append(DONE)

    def failed(self, error: KvfleetError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"
