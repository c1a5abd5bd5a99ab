"""Switches off, in this process alone, what keeps a stream whole: each must turn the suite red, or the suite is blind.

Patches sit around the functions, not in them, so that they mean the same however those are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from kvfleet.worker.serve.chat_intake import ChatIntake, TakenChat
from kvfleet.worker.serve.hand_over import HandOver
from kvfleet.worker.streams.records import AttemptRecord
from kvproto.messages import Chat, Frame, GenerateRequest, Tokens
from kvproto.streams.request_driver import RequestDriver
from kvproto.streams.stream import Stream
from kvproto.streams.stream_assembly import StreamAssembly
from kvsampling.grammar import Matcher

Mutation = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def without_fencing() -> Iterator[None]:
    """Frames of an old attempt pass as the present one's."""
    original = Stream.on_frame

    def on_frame(self: Stream, frame: Frame) -> None:
        original(self, replace(frame, attempt=self.assembly.attempt))

    with mock.patch.object(Stream, "on_frame", on_frame):
        yield


@contextlib.contextmanager
def without_duplicate_removal() -> Iterator[None]:
    """Tokens that are there already are delivered again."""
    original = StreamAssembly.accept

    def accept(self: StreamAssembly, frame: Frame) -> list[Frame]:
        if isinstance(frame, Tokens) and frame.index + len(frame.ids) <= len(self.choices[frame.choice].ids):
            return [frame]
        return original(self, frame)

    with mock.patch.object(StreamAssembly, "accept", accept):
        yield


@contextlib.contextmanager
def without_resend() -> Iterator[None]:
    """Nobody asks for frames that were lost."""

    async def say_nothing(self: RequestDriver, *arguments: Any) -> None:
        pass

    with mock.patch.object(RequestDriver, "_ask_again", say_nothing):
        yield


@contextlib.contextmanager
def without_earlier_outputs_in_grammars() -> Iterator[None]:
    """A sequence that goes on elsewhere begins its grammar anew."""
    original = Matcher._compute
    known: dict[Matcher, int] = {}

    def compute(self: Matcher, outputs: Sequence[int]) -> Any:
        return original(self, outputs[known.setdefault(self, len(outputs)) :])

    with mock.patch.object(Matcher, "_compute", compute):
        yield


@contextlib.contextmanager
def without_earlier_text_in_messages() -> Iterator[None]:
    """A worker reads a message that goes on as one that begins."""
    original = ChatIntake.take

    def take(self: ChatIntake, request: GenerateRequest, chat: Chat) -> TakenChat:
        return original(self, replace(request, output_ids=(), text_sent=0, continuations=()), chat)

    with mock.patch.object(ChatIntake, "take", take):
        yield


@contextlib.contextmanager
def without_word_of_hand_overs() -> Iterator[None]:
    """A worker for prompts lets go of a request after its first token, and tells nobody."""

    async def let_go(self: HandOver, record: AttemptRecord) -> None:
        await self.parts.engine.let_go([record.key], keep=False)

    with mock.patch.object(HandOver, "after_prefill", let_go):
        yield
