"""Anthropic's answers as bytes, whole and as streams; `anthropic_answers` has their types. Pure. A message is a list of
blocks, each begun and ended:

message_start ─▶ (content_block_start ─▶ content_block_delta... ─▶ content_block_stop)... ─▶ message_delta
              ─▶ message_stop
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from kvchat.message_builder import call_id
from kvchat.parts import ArgumentsGrew, CallBegan, Part, Said, Thought
from kvchat.source import MessageReader
from kvfleet.ingress.answers.anthropic_answers import (
    BlockAnswer,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageAnswer,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    SaidText,
    SaidThought,
    TextDelta,
    ThinkingDelta,
    ToolUse,
    message_end,
    message_error,
    message_usage,
)
from kvfleet.ingress.answers.openai_answers import cached_tokens
from kvfleet.ingress.runs.event_ids import START, EventIds, Position
from kvfleet.ingress.runs.transcript import ChoiceTranscript, Transcript
from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, Finished


@dataclass(slots=True)
class MessageBlocks:
    """Of one message, as events tell them. The last goes on while `is_open`."""

    request: str
    whole: list[BlockAnswer] = field(default_factory=list)
    is_open: bool = False
    _arguments: str = ""

    def take(self, parts: Iterable[Part]) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        for part in parts:
            match part:
                case Said(text):
                    said = self._goes_on(SaidText("text", ""), events)
                    said.text += text
                    self._grow(TextDelta("text_delta", text), events)
                case Thought(text):
                    thought = self._goes_on(SaidThought("thinking", "", ""), events)
                    thought.thinking += text
                    self._grow(ThinkingDelta("thinking_delta", text), events)
                case CallBegan(index, name):
                    self.end(events)
                    self._goes_on(ToolUse("tool_use", f"toolu_{call_id(self.request, 0, index)}", name, {}), events)
                case ArgumentsGrew(_, text):
                    self._arguments += text
                    self._grow(InputDelta("input_json_delta", text), events)
        return events

    def end(self, events: list[MessageEvent]) -> None:
        """Of the last block."""
        if not self.is_open:
            return
        if isinstance(self.whole[-1], ToolUse):
            self.whole[-1].input = _input(self._arguments)
            self._arguments = ""
        self.is_open = False
        events.append(BlockStop("content_block_stop", len(self.whole) - 1))

    def _goes_on(self, empty: Any, events: list[MessageEvent]) -> Any:
        """The last block, if it is open and of this kind, else this one, which begins."""
        if not self.is_open or type(self.whole[-1]) is not type(empty):
            self.end(events)
            self.is_open = True
            self.whole.append(empty)
            events.append(BlockStart("content_block_start", len(self.whole) - 1, replace(empty)))
        return self.whole[-1]

    def _grow(self, delta: TextDelta | ThinkingDelta | InputDelta, events: list[MessageEvent]) -> None:
        events.append(BlockDelta("content_block_delta", len(self.whole) - 1, delta))


def _input(arguments: str) -> Any:
    """A call that was cut has what can be read of it: nothing."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


@dataclass(frozen=True, slots=True)
class AnthropicForm:
    request: str
    model: str
    reader: Callable[[], MessageReader]
    prompt_digest: str = ""
    size = 0  # all of it is small

    def writer(self, at: Position = START, *, id_lines: bool = False) -> AnthropicEvents:
        """Raises InvalidRequest for a position that this answer cannot have."""
        return AnthropicEvents(self, at, id_lines)

    def body(self, transcript: Transcript) -> bytes:
        finished = transcript.finished
        assert finished is not None
        reader, blocks = self.reader(), MessageBlocks(self.request)
        blocks.take(reader.feed(transcript.choices[0].text) + reader.end())
        blocks.end([])
        usage = message_usage(finished.prompt_tokens, cached_tokens(transcript), finished.output_tokens)
        return orjson.dumps(self.message(blocks.whole, message_end(finished, called=bool(reader.calls)), usage))

    def message(self, content: list[BlockAnswer], end: MessageEnd | None, usage: MessageUsage) -> MessageAnswer:
        reason, stop = (end.stop_reason, end.stop_sequence) if end is not None else (None, None)
        return MessageAnswer(
            f"msg_{self.request}", "message", "assistant", self.model, content, reason, stop, usage
        )  # fmt: skip


class AnthropicEvents:
    """Writer for one reader."""

    def __init__(self, form: AnthropicForm, at: Position, id_lines: bool) -> None:
        self._form = form
        self.ids = EventIds(form.request, 1, at, prompt=form.prompt_digest, lines=id_lines)
        self._reader: MessageReader | None = None
        self._blocks = MessageBlocks(form.request)

    def started(self, transcript: Transcript, out: list[bytes]) -> None:
        started = transcript.started
        if self.ids.begun or started is None:
            return
        usage = message_usage(started.prompt_tokens, started.cached_tokens, 0)
        message = self._form.message([], None, usage)
        out.append(self._events(self.ids.begin(), [MessageStart("message_start", message)]))

    def tokens(self, choice: int, said: ChoiceTranscript, begin: int, out: list[bytes]) -> None:
        reader = self._reading(said, begin)
        before, after = self.ids.around(choice)
        for at in range(begin, len(said.pieces)):
            events = self._blocks.take(reader.feed(said.pieces[at]))
            if events:
                out.append(self._events(before + b"%d" % (at + 1) + after, events))

    def choice_finished(self, ended: ChoiceFinished, said: ChoiceTranscript, out: list[bytes]) -> None:
        """There is one choice: never called."""

    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None:
        said = transcript.choices[0]
        reader = self._reading(said, len(said.pieces))
        events = self._blocks.take(reader.end())
        self._blocks.end(events)
        usage = message_usage(finished.prompt_tokens, cached_tokens(transcript), finished.output_tokens)
        end = message_end(finished, called=bool(reader.calls))
        events += [MessageDelta("message_delta", end, usage), MessageStop("message_stop")]
        out.append(self._events(self.ids.next_end(), events))

    def failed(self, error: KvfleetError) -> bytes:
        return self.ids.line(self.ids.here()) + b"event: error\ndata: " + message_error(error) + b"\n\n"

    def _reading(self, said: ChoiceTranscript, begin: int) -> MessageReader:
        """It has read what the client has."""
        if self._reader is None:
            self._reader = self._form.reader()
            self._blocks.take(self._reader.feed("".join(said.pieces[:begin])))
        return self._reader

    def _events(self, event_id: bytes, events: list[MessageEvent]) -> bytes:
        """The last one has the id: a client that lacks it lacks them all."""
        told = [b"event: %b\ndata: %b\n\n" % (event.type.encode(), orjson.dumps(event)) for event in events]
        return b"".join(told[:-1]) + self.ids.line(event_id) + told[-1]
