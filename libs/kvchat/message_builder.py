"""One choice's message, put together as its text comes. Pure."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvchat.formats.think import plain
from kvchat.parts import ArgumentsGrew, CallBegan, Part, Said, Thought
from kvchat.source import MessageReader
from kvproto.ids import base32
from kvproto.messages import AssistantCall, AssistantCallDelta, AssistantDelta, AssistantMessage, FinishReason

log = logging.getLogger(__name__)

ID_CHARS = 9  # as Mistral's templates want them


def call_id(request: str, choice: int, index: int) -> str:
    """The same whenever the message is read."""
    return base32(hashlib.blake2b(f"{request}\0{choice}\0{index}".encode(), digest_size=8).digest())[:ID_CHARS]


@dataclass(eq=False, slots=True)
class MessageBuilder:
    """`end` it once."""

    reader: MessageReader
    request: str
    choice: int
    _said: list[str] = field(default_factory=list)
    _thought: list[str] = field(default_factory=list)
    _calls: list[AssistantCall] = field(default_factory=list)
    _arguments: list[list[str]] = field(default_factory=list)  # of each call

    def read(self, piece: str) -> AssistantDelta:
        try:
            return self._add(self.reader.feed(piece))
        except Exception:  # a format's bug is that message's alone
            about = {"request": self.request}
            log.exception("request %s: what the model writes goes on as text", self.request, extra=about)
            self.reader = MessageReader(plain)
            return self._add(self.reader.feed(piece))

    def end(self, reason: FinishReason) -> AssistantMessage:
        self._add(self.reader.end())
        calls = tuple(replace(call, arguments="".join(self._arguments[at])) for at, call in enumerate(self._calls))
        why = "tool_calls" if calls and reason is FinishReason.STOP else reason.value
        return AssistantMessage(why, "".join(self._said), "".join(self._thought), calls)

    def _add(self, parts: Iterable[Part]) -> AssistantDelta:
        delta = AssistantDelta()
        for part in parts:
            match part:
                case Said(text):
                    self._said.append(text)
                    delta = replace(delta, content=delta.content + text)
                case Thought(text):
                    self._thought.append(text)
                    delta = replace(delta, reasoning_content=delta.reasoning_content + text)
                case CallBegan(index, name):
                    self._calls.append(AssistantCall(call_id(self.request, self.choice, index), name, ""))
                    self._arguments.append([])
                    begun = AssistantCallDelta(index, self._calls[-1].id, name)
                    delta = replace(delta, tool_calls=(*delta.tool_calls, begun))
                case ArgumentsGrew(index, text):
                    self._arguments[index].append(text)
                    *before, last = delta.tool_calls or (AssistantCallDelta(index),)
                    grown = replace(last, arguments=last.arguments + text)
                    delta = replace(delta, tool_calls=(*before, grown))
        return delta
