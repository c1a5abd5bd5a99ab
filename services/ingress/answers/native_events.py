"""The events of POST /generate as bytes: `start`, `token` each, then `done` or `error`, with `id:` lines. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import orjson

from kvfleet.ingress.answers.openai_events import cached_tokens, usage_map
from kvfleet.ingress.answers.openai_logprobs import native_logprobs
from kvfleet.ingress.prompts.token_spelling import TokenSpelling
from kvfleet.ingress.runs.event_ids import START, EventIds, Position
from kvfleet.ingress.runs.transcript import ChoiceTranscript, Transcript
from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, Finished, Started


@dataclass(frozen=True, slots=True)
class NativeForm:
    """What every reader of one answer gets. With `spelling`, that of the model's tokens, events have the tokens' log
    probabilities."""

    request: str
    seq_id: str
    prompt: str
    spelling: TokenSpelling | None = None
    prompt_digest: str = ""

    @property
    def size(self) -> int:
        return sys.getsizeof(self.prompt) + sys.getsizeof(self.seq_id)

    def writer(self, at: Position = START, *, id_lines: bool = True) -> NativeEvents:
        """Its events always have `id:` lines. Raises InvalidRequest for a position that this answer
        cannot have."""
        return NativeEvents(self, at)


class NativeEvents:
    """Writer for one reader. Every generated token is one event, also one whose text is held back (empty)."""

    def __init__(self, form: NativeForm, at: Position) -> None:
        self._form = form
        self.ids = EventIds(form.request, 1, at, prompt=form.prompt_digest)

    def started(self, started: Started, out: list[bytes]) -> None:
        if self.ids.begun:
            return
        value = {
            "type": "start",
            "seq_id": self._form.seq_id,
            "prompt": self._form.prompt,
            "cached_tokens": started.cached_tokens,
            "worker_id": started.worker,
            "request_id": self._form.request,
        }
        out.append(self._event(self.ids.begin(), value))

    def tokens(
        self, choice: int, said: ChoiceTranscript, begin: int, out: list[bytes], dumps: Any = orjson.dumps
    ) -> None:
        spelling = self._form.spelling
        before, after = self.ids.around(choice)
        number = begin
        if spelling is not None and said.is_scored:
            for token, piece, scores in zip(said.ids[begin:], said.pieces[begin:], said.logprobs[begin:], strict=True):
                number += 1
                event = {"type": "token", "token": piece, "token_id": token, **native_logprobs(spelling, scores)}
                out.append(self._event(before + b"%d" % number + after, event))
            return
        form = self.ids.line(before + b"%d" + after) + b'data: {"type":"token","token":%b,"token_id":%d}\n\n'
        for token, piece in zip(said.ids[begin:], said.pieces[begin:], strict=True):
            number += 1
            out.append(form % (number, dumps(piece), token))

    def choice_finished(self, ended: ChoiceFinished, out: list[bytes]) -> None:
        """A session has one continuation: never called."""

    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None:
        value = {
            "type": "done",
            "generated_text": self._form.prompt + transcript.choices[0].text,
            "tokens_generated": finished.output_tokens,
            "finish_reason": finished.reason.value,
            "usage": usage_map(finished, cached_tokens(transcript)),
            "seq_id": self._form.seq_id,
            "worker_id": finished.worker,
            "request_id": self._form.request,
        }
        out.append(self._event(self.ids.next_end(), value))

    def failed(self, error: KvfleetError) -> bytes:
        return self._event(self.ids.here(), {"type": "error", "error": str(error), "code": error.code})

    def _event(self, event_id: bytes, value: dict[str, Any]) -> bytes:
        return self.ids.line(event_id) + b"data: " + orjson.dumps(value) + b"\n\n"
