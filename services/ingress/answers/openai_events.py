"""OpenAI's answers as bytes, whole and as streams; `openai_answers` has their types. Pure. Chunks are built once per
request and choice, as the bytes around the text; a token then costs one escaped string and a few appends. With log
probabilities each token's chunk is made anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import orjson

from kvchat.parts import Part, Said
from kvchat.source import MessageReader
from kvfleet.ingress.answers.openai_answers import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    Reason,
    Usage,
    chat_logprobs,
    completion_logprobs,
    fleet_note,
    usage_of,
)
from kvfleet.ingress.answers.prompt_answers import ShownPrompt, written
from kvfleet.ingress.answers.tool_calls import delta_of, message_of
from kvfleet.ingress.http.error_bodies import error_body
from kvfleet.ingress.prompts.tokenizer import TokenSpelling
from kvfleet.ingress.runs.event_ids import START, EventIds, Position
from kvfleet.ingress.runs.transcript import ChoiceTranscript, Transcript
from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, Finished, FinishReason, TokenLogprobs

DONE = b"data: [DONE]\n\n"
_MARK = "\x00text\x00"  # stands for the text while a template is cut
_MARK_JSON = orjson.dumps(_MARK)
_PLACE = b"\x00place\x00"  # and for the event's id
_PLACE_JSON = orjson.dumps(_PLACE.decode())


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Of one prompt of several: the answer's id, and how many are before it."""

    answer: str
    before: int


@dataclass(frozen=True, slots=True)
class OpenAiForm:
    """What every chunk and body of one answer repeats. `spelling`: of the model's tokens, for log probabilities. With
    `include_usage` every chunk has `usage: null`, and a last one, without choices, the usage."""

    request: str
    model: str
    created: int
    fingerprint: str
    chat: bool
    choices: int = 1
    spelling: TokenSpelling | None = None
    prompt_digest: str = ""  # of event ids
    include_usage: bool = False
    reader: Callable[[], MessageReader] | None = None  # of a message with calls, or reasoning
    shown: ShownPrompt | None = None
    batch: BatchPlace | None = None  # another part ends the answer

    @property
    def first(self) -> int:
        """The number of its first choice."""
        return 0 if self.batch is None else self.choices * self.batch.before

    @property
    def size(self) -> int:
        return 0 if self.shown is None else self.choices * self.shown.size

    def writer(self, at: Position = START, *, id_lines: bool = False) -> OpenAiEvents:
        """Raises InvalidRequest for a position that this answer cannot have."""
        return OpenAiEvents(self, at, id_lines)

    def body(self, transcript: Transcript) -> bytes:
        """The whole answer of a request that does not stream."""
        finished = transcript.finished
        assert finished is not None
        kind = ChatAnswer if self.chat else CompletionAnswer
        of_prompt = _OfPrompt(self.shown, transcript.prompt_scores)
        choices, thoughts = self.choices_of(transcript, of_prompt)
        usage, note = usage_of(finished, transcript, thoughts), fleet_note(self.request, finished, transcript)
        more: dict[str, Any] = {}
        if self.chat:
            more = {"prompt_logprobs": of_prompt.listed, "prompt_token_ids": of_prompt.ids}
        return orjson.dumps(kind(**self.as_map(chunk=False), choices=choices, usage=usage, kvfleet=note, **more))

    def choices_of(self, transcript: Transcript, of_prompt: _OfPrompt | None = None) -> tuple[list[Any], int]:
        """And how many of their tokens are thoughts."""
        of_prompt = of_prompt or _OfPrompt(self.shown, transcript.prompt_scores)
        readers = [self._reader(said) for said in transcript.choices]
        told = enumerate(zip(transcript.choices, readers, strict=True), self.first)
        choices = [self._choice(index, said, of_prompt, *one) for index, (said, one) in told]
        return choices, sum(reader.thoughts for reader, _ in readers if reader is not None)

    def _choice(
        self, index: int, said: ChoiceTranscript, prompt: _OfPrompt, reader: MessageReader | None, parts: list[Part]
    ) -> ChatChoice | CompletionChoice:
        assert said.reason is not None
        spelling = self.spelling if said.is_scored else None
        ids = None if prompt.ids is None else written(said.ids)
        if not self.chat:
            scored = (said.ids, said.pieces, said.logprobs, len(prompt.text))
            lists = None if spelling is None else completion_logprobs(spelling, *scored)
            if prompt.echoed is not None and lists is not None:
                lists = prompt.echoed.then(lists)
                if (last := self.of_stop_token(said)) is not None:
                    lists = lists.then(last)
            told = (prompt.listed, prompt.ids, ids)
            return CompletionChoice(index, prompt.text + said.text, lists, said.reason, *told)
        scores = None if spelling is None else chat_logprobs(spelling, said.ids, said.logprobs)
        if reader is None:
            message = {"role": "assistant", "content": said.text, "refusal": None}
            return ChatChoice(index, cast("AnswerMessage", message), scores, said.reason, ids)
        message = message_of(parts, self.request, index)
        return ChatChoice(index, cast("AnswerMessage", message), scores, reason_of(reader, said.reason), ids)

    def of_stop_token(self, said: ChoiceTranscript) -> CompletionLogprobs | None:
        """An echoed answer ends with it, as of vLLM's servers: who scores a continuation takes the last entry for the
        one generated token (lm-eval)."""
        shown, end = self.shown, said.stop_token
        if self.spelling is None or shown is None or shown.logprobs is None or end is None:
            return None
        return completion_logprobs(
            self.spelling, (end.id,), ("",), (end.logprobs,), len(shown.text or "") + len(said.text)
        )

    def _reader(self, said: ChoiceTranscript) -> tuple[MessageReader | None, list[Part]]:
        """It has read all, to these parts."""
        if self.reader is None:
            return None, []
        reader = self.reader()
        parts = [part for piece in said.pieces for part in reader.feed(piece)]
        return reader, parts + reader.end()

    def as_map(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        prefix = "chatcmpl-" if self.chat else "cmpl-"
        return {
            "id": prefix + (self.request if self.batch is None else self.batch.answer),
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class _OfPrompt:
    """What every choice of an answer tells of its prompt, made once."""

    def __init__(self, shown: ShownPrompt | None, scores: Sequence[TokenLogprobs]) -> None:
        self.text = shown.text or "" if shown is not None else ""
        self.echoed = shown.echoed(scores) if shown is not None else None
        self.listed = shown.listed(scores) if shown is not None else None
        self.ids = written(shown.ids) if shown is not None and shown.tells_ids else None


def reason_of(reader: MessageReader, reason: FinishReason) -> Reason:
    return "tool_calls" if reader.calls and reason is FinishReason.STOP else reason


class OpenAiEvents:
    """Writer for one reader. Each choice ends in a chunk with its `finish_reason`; the last one names the worker."""

    def __init__(self, form: OpenAiForm, at: Position, id_lines: bool) -> None:
        self._form = form
        shown = form.shown
        self._tells_ids = shown is not None and shown.tells_ids
        self._echo = (shown and shown.text) or ""
        announced = form.chat or self._tells_ids or bool(self._echo)
        self.ids = EventIds(
            form.request, form.choices, at, announced=announced, prompt=form.prompt_digest, lines=id_lines
        )
        self._around = [self._template(choice) for choice in range(form.choices)]
        self._running = form.choices - len(self.ids.ended)
        self._last: ChoiceFinished | None = None  # of several choices the one that ended last
        self._readers: dict[int, MessageReader] = {}  # of each choice that had tokens
        self._offsets: dict[int, int] = {}  # characters of each choice that has had scored tokens

    def _template(self, choice: int) -> tuple[bytes, bytes, bytes]:
        """A chunk's bytes before its text, between text and event id, and after that."""
        template = self._data(_PLACE, (self._choice(choice, self._text(_MARK)),), None, {})
        before, _, rest = template.rpartition(_MARK_JSON)  # no caller's text follows it
        middle, _, after = rest.partition(_PLACE_JSON)
        return before, middle + b'"', b'"' + after

    def _text(self, text: str) -> Any:
        return {"content": text} if self._form.chat else text

    def _choice(self, index: int, delta: Any, logprobs: Any = None, finish: Reason | None = None) -> dict[str, Any]:
        name = "delta" if self._form.chat else "text"
        return {"index": self._form.first + index, name: delta, "logprobs": logprobs, "finish_reason": finish}

    def _event(
        self, event_id: bytes, *choices: Any, usage: Usage | None = None, fleet: Mapping[str, Any] = {}, **more: Any
    ) -> bytes:
        return self.ids.line(event_id) + self._data(event_id, choices, usage, fleet, **more)

    def _data(
        self, event_id: bytes, choices: Sequence[Any], usage: Usage | None, fleet: Mapping[str, Any], **more: Any
    ) -> bytes:
        told = {"usage": usage} if self._form.include_usage else {}
        note = {**fleet, "event_id": event_id.decode()}
        chunk = {**self._form.as_map(chunk=True), **more, "choices": choices, **told, "kvfleet": note}
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def started(self, transcript: Transcript, out: list[bytes]) -> None:
        of_prompt = _OfPrompt(self._form.shown, transcript.prompt_scores)
        ids: dict[str, Any] = {} if of_prompt.ids is None else {"prompt_token_ids": of_prompt.ids}
        for at in range(self.ids.begun, self._form.choices):
            event_id = self.ids.begin()
            if self._form.chat:
                out.append(self._event(event_id, self._choice(at, {"role": "assistant", "content": ""}), **ids))
            else:
                out.append(self._event(event_id, self._choice(at, of_prompt.text, of_prompt.echoed) | ids))

    def tokens(
        self, choice: int, said: ChoiceTranscript, begin: int, out: list[bytes], dumps: Any = orjson.dumps
    ) -> None:
        spelling = self._form.spelling if said.is_scored else None
        if spelling is not None or self._tells_ids:
            self._single_tokens(choice, said, begin, spelling, out)
            return
        before, middle, after = self._around[choice]
        id_before, id_after = self.ids.around(choice)
        middle, after = middle + id_before, id_after + after
        line, _, line_end = self.ids.line(id_before + _PLACE + id_after).partition(_PLACE)
        before = line_end + before
        reader = self._reader(choice, said, begin)
        number = begin
        for piece in said.pieces[begin:] if begin else said.pieces:
            number += 1
            place = b"%d" % number
            if reader is not None:
                parts = reader.feed(piece)
                if len(parts) != 1 or not isinstance(parts[0], Said):  # else it is text like any other
                    if parts:
                        delta = delta_of(parts, self._form.request, choice)
                        out.append(self._event(id_before + place + id_after, self._choice(choice, delta)))
                    continue
                piece = parts[0].text
            if piece:  # empty: held back, it comes with a later token
                if line:
                    out += (line, place)
                out += (before, dumps(piece), middle, place, after)

    def _single_tokens(
        self, choice: int, said: ChoiceTranscript, begin: int, spelling: TokenSpelling | None, out: list[bytes]
    ) -> None:
        """A chunk each, also for a token whose text is held back. `spelling`: with log probabilities."""
        before, after = self.ids.around(choice)
        reader = self._reader(choice, said, begin)
        offset = self._offsets.get(choice)
        if offset is None:
            offset = len(self._echo) + sum(map(len, said.pieces[:begin]))
        for at in range(begin, len(said.ids)):
            token, piece = said.ids[at], said.pieces[at]
            logprobs: ChatLogprobs | CompletionLogprobs | None = None
            if spelling is not None and self._form.chat:
                logprobs = chat_logprobs(spelling, (token,), said.logprobs[at : at + 1])
            elif spelling is not None:
                logprobs = completion_logprobs(spelling, (token,), (piece,), said.logprobs[at : at + 1], offset)
            offset += len(piece)
            delta = self._text(piece)
            if reader is not None:
                delta = delta_of(reader.feed(piece), self._form.request, choice)
            event_id = before + b"%d" % (at + 1) + after
            told = self._choice(choice, delta, logprobs)
            if self._tells_ids:
                told["token_ids"] = [token]
            out.append(self._event(event_id, told))
        self._offsets[choice] = offset

    def _reader(self, choice: int, said: ChoiceTranscript, begin: int) -> MessageReader | None:
        """It has read what the client has."""
        if self._form.reader is None:
            return None
        reader = self._readers.get(choice)
        if reader is None:
            reader = self._readers[choice] = self._form.reader()
            for piece in said.pieces[:begin]:
                reader.feed(piece)
        return reader

    def _end(self, choice: int, said: ChoiceTranscript, reason: FinishReason) -> dict[str, Any]:
        """With what a reader held back."""
        reader = self._reader(choice, said, len(said.ids))
        if reader is None:
            return self._choice(choice, {} if self._form.chat else "", self._form.of_stop_token(said), reason)
        delta = delta_of(reader.end(), self._form.request, choice)
        return self._choice(choice, delta, finish=reason_of(reader, reason))

    def choice_finished(self, ended: ChoiceFinished, said: ChoiceTranscript, out: list[bytes]) -> None:
        self._running -= 1
        if self._running:
            self.ids.ended.add(ended.choice)
            out.append(self._event(self.ids.here(), self._end(ended.choice, said, ended.reason)))
        else:
            self._last = ended  # its chunk ends the answer

    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None:
        fleet = asdict(fleet_note(self._form.request, finished, transcript))
        index, reason = (0, finished.reason) if self._last is None else (self._last.choice, self._last.reason)
        last = self._end(index, transcript.choices[index], reason)
        out.append(self._event(self.ids.next_end(), last, fleet=fleet))
        if self._form.batch is not None:
            return
        if self._form.include_usage:
            readers = [self._reader(at, said, len(said.pieces)) for at, said in enumerate(transcript.choices)]
            usage = usage_of(finished, transcript, sum(reader.thoughts for reader in readers if reader is not None))
            out.append(self._event(self.ids.next_end(), usage=usage, fleet=fleet))
        out.append(self.ids.line(self.ids.next_end()) + DONE)

    def failed(self, error: KvfleetError) -> bytes:
        return self.ids.line(self.ids.here()) + b"data: " + error_body(error) + b"\n\n"
