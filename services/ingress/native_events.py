"""The events of POST /generate as bytes: `start`, `token` each, then `done` or `error`. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, Finished, Started, Tokens
from services.ingress.openai_events import cached_tokens, usage_map
from services.ingress.openai_logprobs import native_logprobs
from services.ingress.sse import Transcript
from services.ingress.token_spelling import TokenSpelling


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class NativeEvents:
    """Writer of one stream. Every generated token is one event, also one whose text is held back (empty).

    With `spelling`, that of the model's tokens, an event has the token's log probabilities.
    """

    def __init__(self, request: str, seq_id: str, prompt: str, spelling: TokenSpelling | None = None) -> None:
        self._request = request
        self._seq_id = seq_id
        self._prompt = prompt
        self._spelling = spelling

    def started(self, started: Started, out: list[bytes]) -> None:
        out.append(
            _event(
                {
                    "type": "start",
                    "seq_id": self._seq_id,
                    "prompt": self._prompt,
                    "cached_tokens": started.cached_tokens,
                    "worker_id": started.worker,
                    "request_id": self._request,
                }
            )
        )

    def tokens(self, tokens: Tokens, out: list[bytes], dumps: Any = orjson.dumps) -> None:
        if tokens.logprobs and self._spelling is not None:
            for token, piece, scores in zip(tokens.ids, tokens.text, tokens.logprobs, strict=True):
                event = {"type": "token", "token": piece, "token_id": token}
                out.append(_event({**event, **native_logprobs(self._spelling, scores)}))
            return
        for token, piece in zip(tokens.ids, tokens.text, strict=True):
            out.append(b'data: {"type":"token","token":%b,"token_id":%d}\n\n' % (dumps(piece), token))

    def choice_finished(self, ended: ChoiceFinished, out: list[bytes]) -> None:
        """A session has one continuation: never called."""

    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None:
        out.append(
            _event(
                {
                    "type": "done",
                    "generated_text": self._prompt + transcript.text,
                    "tokens_generated": finished.output_tokens,
                    "finish_reason": finished.reason.value,
                    "usage": usage_map(finished, cached_tokens(transcript)),
                    "seq_id": self._seq_id,
                    "worker_id": finished.worker,
                    "request_id": self._request,
                }
            )
        )

    def failed(self, error: KvfleetError) -> bytes:
        return _event({"type": "error", "error": str(error), "code": error.code})
