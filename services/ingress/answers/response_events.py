"""Answers of /v1/responses as bytes, whole and as streams; `response_answers` has their types. Pure.

created ─▶ (queued ─▶) in_progress ─▶ items ─▶ completed | incomplete | failed

    item added ─▶ (part added ─▶) deltas ─▶ text or arguments done ─▶ (part done ─▶) item done

Every event has a number. It follows from the tokens, so a response that another ingress streams, or that is replayed,
has the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import orjson

from kvchat.message_builder import call_id
from kvchat.parts import ArgumentsGrew, CallBegan, Part, Said, Thought
from kvchat.source import MessageReader
from kvfleet.ingress.answers.openai_answers import (
    FleetNote,
    ScoredToken,
    cached_tokens,
    chat_logprobs,
    fleet_note,
)
from kvfleet.ingress.answers.response_answers import (
    CallDone,
    CallGrew,
    Incomplete,
    InputDetails,
    ItemEvent,
    NumberedEvent,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputThought,
    PartEvent,
    ResponseAnswer,
    ResponseEvent,
    ResponseFault,
    ResponseUsage,
    Status,
    TextDone,
    TextGrew,
    ThoughtDone,
    ThoughtGrew,
)
from kvfleet.ingress.prompts.tokenizer import TokenSpelling
from kvfleet.ingress.runs.event_ids import START, EventIds, Position
from kvfleet.ingress.runs.transcript import ChoiceTranscript, Transcript
from kvproto.errors import Cancelled, KvfleetError
from kvproto.messages import ChoiceFinished, Finished, FinishReason

Numbers = Callable[[], int]


@dataclass(slots=True)
class OutputItems:
    """Of one response, as events tell them. The last goes on while `is_open`."""

    request: str
    next_number: Numbers
    whole: list[OutputItem] = field(default_factory=list)
    is_open: bool = False

    def take(self, parts: Iterable[Part], scores: list[ScoredToken]) -> list[NumberedEvent]:
        """`scores` are of the token that brought them."""
        events: list[NumberedEvent] = []
        for part in parts:
            match part:
                case Said(text):
                    said = self._text_of(OutputMessage, events)
                    said.text += text
                    said.logprobs += scores
                    events.append(TextGrew("response.output_text.delta", *self._place(), 0, text, scores))
                case Thought(text):
                    self._text_of(OutputReasoning, events).text += text
                    events.append(ThoughtGrew("response.reasoning_text.delta", *self._place(), 0, text))
                case CallBegan(index, name):
                    item_id, known = self._item_id("fc"), f"call_{call_id(self.request, 0, index)}"
                    self._begin(OutputCall("function_call", item_id, known, name, "", "in_progress"), events)
                case ArgumentsGrew(_, text):
                    call = self.whole[-1]
                    assert isinstance(call, OutputCall)
                    call.arguments += text
                    events.append(CallGrew("response.function_call_arguments.delta", *self._place(), text))
        return events

    def end(self, events: list[NumberedEvent], *, whole: bool = True) -> None:
        """Of the last item, which is `whole` unless the response was cut."""
        if not self.is_open:
            return
        item = self.whole[-1]
        if isinstance(item, OutputCall):
            events.append(CallDone("response.function_call_arguments.done", *self._place(), item.arguments))
        elif isinstance(item, OutputReasoning):
            events.append(ThoughtDone("response.reasoning_text.done", *self._place(), 0, item.content[0].text))
            events.append(PartEvent("response.content_part.done", *self._place(), 0, item.content[0]))
        else:
            said = item.content[0]
            events.append(TextDone("response.output_text.done", *self._place(), 0, said.text, said.logprobs))
            events.append(PartEvent("response.content_part.done", *self._place(), 0, said))
        item.status = "completed" if whole else "incomplete"
        self.is_open = False
        events.append(ItemEvent("response.output_item.done", self.next_number(), len(self.whole) - 1, item))

    def _text_of(self, kind: type[OutputMessage | OutputReasoning], events: list[NumberedEvent]) -> Any:
        """The text of the last item, if it is open and of this kind, else of one that begins."""
        if not self.is_open or type(self.whole[-1]) is not kind:
            self.end(events)
            part: Any
            if kind is OutputMessage:
                part = OutputText("output_text", "", [], [])
                item: Any = OutputMessage("message", self._item_id("msg"), "assistant", "in_progress", [])
            else:
                part = OutputThought("reasoning_text", "")
                item = OutputReasoning("reasoning", self._item_id("rs"), "in_progress", [], [], None)
            self._begin(item, events)
            events.append(PartEvent("response.content_part.added", *self._place(), 0, copy(part)))
            item.content = [part]
        return self.whole[-1].content[0]  # type: ignore[union-attr]

    def _begin(self, item: OutputItem, events: list[NumberedEvent]) -> None:
        self.end(events)
        self.is_open = True
        self.whole.append(item)
        events.append(ItemEvent("response.output_item.added", self.next_number(), len(self.whole) - 1, copy(item)))

    def _item_id(self, kind: str) -> str:
        """Of the next item, once the last one has ended."""
        return f"{kind}_{self.request}_{len(self.whole)}"

    def _place(self) -> tuple[int, int, str]:
        return self.next_number(), len(self.whole) - 1, self.whole[-1].id


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """`told` are the fields of the answer that the request decides, `size` their bytes."""

    request: str
    created: int
    told: Mapping[str, Any]
    reader: Callable[[], MessageReader]
    background: bool = False
    spelling: TokenSpelling | None = None  # for log probabilities
    prompt_digest: str = ""
    size: int = 0

    def writer(self, at: Position = START, *, id_lines: bool = False) -> ResponseEvents:
        """Raises InvalidRequest for a position that this answer cannot have."""
        return ResponseEvents(self, at, id_lines)

    def body(self, transcript: Transcript) -> bytes:
        return orjson.dumps(self.whole(transcript))

    def whole(self, transcript: Transcript) -> ResponseAnswer:
        events = ResponseEvents(self, START, id_lines=False)
        events.tokens(0, transcript.choices[0], 0, [])
        return events.ended(transcript, [])

    def unfinished(self, status: Status) -> ResponseAnswer:
        """Of one that has no output yet."""
        return self.answer(status, [])

    def failed(self, error: KvfleetError) -> ResponseAnswer:
        return self.answer("cancelled" if isinstance(error, Cancelled) else "failed", [], fault=fault_of(error))

    def answer(
        self,
        status: Status,
        output: list[OutputItem],
        *,
        usage: ResponseUsage | None = None,
        note: FleetNote | None = None,
        fault: ResponseFault | None = None,
    ) -> ResponseAnswer:
        return ResponseAnswer(
            **self.told,
            id=f"resp_{self.request}",
            object="response",
            created_at=self.created,
            status=status,
            background=self.background,
            error=fault,
            incomplete_details=Incomplete("max_output_tokens") if status == "incomplete" else None,
            output=output,
            service_tier="default",
            usage=usage,
            kvfleet=note,
        )


def fault_of(error: KvfleetError) -> ResponseFault | None:
    if isinstance(error, Cancelled):
        return None
    code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
    return ResponseFault(code if error.http_status >= 429 else "invalid_prompt", f"{error} ({error.code})")


class ResponseEvents:
    """Writer for one reader."""

    def __init__(self, form: ResponseForm, at: Position, id_lines: bool) -> None:
        self._form = form
        self.ids = EventIds(form.request, 1, at, prompt=form.prompt_digest, lines=id_lines)
        self._after = at.number
        self._numbers = 0
        self._items = OutputItems(form.request, self._next)
        self._reader: MessageReader | None = None
        self._begun = False

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def started(self, transcript: Transcript, out: list[bytes]) -> None:
        first = self._begin()
        if not self.ids.begun:
            self._write(self.ids.begin(), first, out)

    def _begin(self) -> list[NumberedEvent]:
        """The first events, once."""
        if self._begun:
            return []
        self._begun = True
        form = self._form
        if not form.background:
            answer = form.unfinished("in_progress")
            return [
                ResponseEvent("response.created", self._next(), answer),
                ResponseEvent("response.in_progress", self._next(), answer),
            ]
        queued = form.unfinished("queued")
        return [
            ResponseEvent("response.created", self._next(), queued),
            ResponseEvent("response.queued", self._next(), queued),
            ResponseEvent("response.in_progress", self._next(), form.unfinished("in_progress")),
        ]

    def tokens(self, choice: int, said: ChoiceTranscript, begin: int, out: list[bytes]) -> None:
        self._read(said, begin)
        before, after = self.ids.around(choice)
        for at in range(begin, len(said.pieces)):
            events = self._take(said, at)
            if events:
                self._write(before + b"%d" % (at + 1) + after, events, out)

    def _take(self, said: ChoiceTranscript, at: int) -> list[NumberedEvent]:
        assert self._reader is not None
        scores: list[ScoredToken] = []
        if self._form.spelling is not None and said.is_scored:
            scores = chat_logprobs(self._form.spelling, said.ids[at : at + 1], said.logprobs[at : at + 1]).content
        return self._items.take(self._reader.feed(said.pieces[at]), scores)

    def _read(self, said: ChoiceTranscript, count: int) -> None:
        """What the client has, token by token, as events are numbered so."""
        self._begin()
        if self._reader is None:
            self._reader = self._form.reader()
            for at in range(min(count, len(said.pieces))):
                self._take(said, at)

    def choice_finished(self, ended: ChoiceFinished, said: ChoiceTranscript, out: list[bytes]) -> None:
        """There is one choice: never called."""

    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None:
        events: list[NumberedEvent] = []
        answer = self.ended(transcript, events)
        kind: Any = f"response.{answer.status}"
        events.append(ResponseEvent(kind, self._next(), answer))
        self._write(self.ids.next_end(), events, out, always=True)

    def ended(self, transcript: Transcript, events: list[NumberedEvent]) -> ResponseAnswer:
        """The whole response; appends the events of its last items."""
        said, finished = transcript.choices[0], transcript.finished
        assert finished is not None
        self._read(said, len(said.pieces))
        assert self._reader is not None
        whole = finished.reason is not FinishReason.LENGTH
        events += self._items.take(self._reader.end(), [])
        self._items.end(events, whole=whole)
        cached, prompt, generated = cached_tokens(transcript), finished.prompt_tokens, finished.output_tokens
        usage = ResponseUsage(
            prompt, InputDetails(cached, 0), generated, OutputDetails(self._reader.thoughts), prompt + generated
        )
        note = fleet_note(self._form.request, finished, transcript)
        status: Status = "completed" if whole else "incomplete"
        return self._form.answer(status, self._items.whole, usage=usage, note=note)

    def failed(self, error: KvfleetError) -> bytes:
        out: list[bytes] = []
        events = self._begin() if not self.ids.begun else []
        self._begin()
        answer = self._form.failed(error)
        self._write(self.ids.here(), [*events, ResponseEvent("response.failed", self._next(), answer)], out)
        return b"".join(out)

    def _write(self, event_id: bytes, events: list[NumberedEvent], out: list[bytes], *, always: bool = False) -> None:
        """One entry, of those that the client lacks. The last one has the id: a client that lacks it lacks them all."""
        told = [
            b"event: %b\ndata: %b\n\n" % (event.type.encode(), orjson.dumps(event))
            for event in events
            if event.sequence_number > self._after
        ]
        if told:
            out.append(b"".join(told[:-1]) + self.ids.line(event_id) + told[-1])
        elif always:
            out.append(b"")
