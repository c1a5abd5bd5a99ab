"""The events of POST /generate, as types and as bytes: `start`, each `token`, then `done` or `error`. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from kvfleet.ingress.answers.openai_answers import Usage, usage_of
from kvfleet.ingress.http.answer_types import Described, Natural
from kvfleet.ingress.prompts.tokenizer import TokenSpelling
from kvfleet.ingress.runs.event_ids import START, EventIds, Position
from kvfleet.ingress.runs.transcript import ChoiceTranscript, Transcript
from kvproto.codec import floored
from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, Finished, FinishReason


class StartEvent(Described):
    type: Literal["start"]
    seq_id: str
    prompt: str
    cached_tokens: Natural
    worker_id: str
    request_id: str


class TokenEvent(Described):
    type: Literal["token"]
    token: str
    token_id: Natural


class RankedTokenId(Described):
    token: str
    token_id: Natural
    logprob: float


class ScoredTokenEvent(TokenEvent):
    logprob: float
    top_logprobs: list[RankedTokenId]


class DoneEvent(Described):
    type: Literal["done"]
    generated_text: str
    tokens_generated: Natural
    finish_reason: FinishReason
    usage: Usage
    seq_id: str
    worker_id: str
    request_id: str


class ErrorEvent(Described):
    type: Literal["error"]
    error: str
    code: str


NATIVE_EVENTS = (StartEvent, TokenEvent, ScoredTokenEvent, DoneEvent, ErrorEvent)


@dataclass(frozen=True, slots=True)
class NativeForm:
    """With `spelling` (of the model's tokens) events have log probabilities."""

    request: str
    seq_id: str
    prompt: str
    spelling: TokenSpelling | None = None
    prompt_digest: str = ""

    @property
    def size(self) -> int:
        return sys.getsizeof(self.prompt) + sys.getsizeof(self.seq_id)

    def writer(self, at: Position = START, *, id_lines: bool = True) -> NativeEvents:
        """Its events always have `id:` lines. Raises InvalidRequest for a position that this answer cannot have."""
        return NativeEvents(self, at)


class NativeEvents:
    """Writer for one reader. Every token is one event, also one whose text is held back (empty)."""

    def __init__(self, form: NativeForm, at: Position) -> None:
        self._form = form
        self.ids = EventIds(form.request, 1, at, prompt=form.prompt_digest)

    def started(self, transcript: Transcript, out: list[bytes]) -> None:
        started = transcript.started
        if self.ids.begun or started is None:
            return
        form = self._form
        event = StartEvent("start", form.seq_id, form.prompt, started.cached_tokens, started.worker, form.request)
        out.append(self._event(self.ids.begin(), event))

    def tokens(
        self, choice: int, said: ChoiceTranscript, begin: int, out: list[bytes], dumps: Any = orjson.dumps
    ) -> None:
        spelling = self._form.spelling
        before, after = self.ids.around(choice)
        number = begin
        if spelling is not None and said.is_scored:
            for token, piece, scores in zip(
                said.ids[begin:], said.pieces[begin:], map(floored, said.logprobs[begin:]), strict=True
            ):
                number += 1
                ranked = zip(scores.top_ids, scores.top_logprobs, strict=True)
                top = [RankedTokenId(spelling.text_of(one), one, value) for one, value in ranked]
                event = ScoredTokenEvent("token", piece, token, scores.logprob, top)
                out.append(self._event(before + b"%d" % number + after, event))
            return
        form = self.ids.line(before + b"%d" + after) + b'data: {"type":"token","token":%b,"token_id":%d}\n\n'
        for token, piece in zip(said.ids[begin:], said.pieces[begin:], strict=True):
            number += 1
            out.append(form % (number, dumps(piece), token))

    def choice_finished(self, ended: ChoiceFinished, said: ChoiceTranscript, out: list[bytes]) -> None:
        """A session has one continuation: never called."""

    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None:
        form = self._form
        event = DoneEvent(
            "done",
            form.prompt + transcript.choices[0].text,
            finished.output_tokens,
            finished.reason,
            usage_of(finished, transcript),
            form.seq_id,
            finished.worker,
            form.request,
        )
        out.append(self._event(self.ids.next_end(), event))

    def failed(self, error: KvfleetError) -> bytes:
        return self._event(self.ids.here(), ErrorEvent("error", str(error), error.code))

    def _event(self, event_id: bytes, event: Any) -> bytes:
        return self.ids.line(event_id) + b"data: " + orjson.dumps(event) + b"\n\n"
