"""Chats that a worker renders, and the messages that it reads from what its model writes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvproto.messages.vocabulary import Count, MaxLength, Name, Text, UnixSeconds


@dataclass(frozen=True, slots=True)
class Chat:
    """As OpenAI's clients say it, made by `kvproto.chats.chat_of`."""

    text: Text  # JSON: messages, tools and the like
    conversation: Name = ""  # of all its turns: where the last one's blocks are
    unix_s: UnixSeconds = 0  # for templates that tell the date, so that every attempt tells the same; 0: not said yet


@dataclass(frozen=True, slots=True)
class AssistantCallDelta:
    """Part of call `index` of a message. The first has `id` and `name`."""

    index: Count
    id: Name = ""
    name: Name = ""
    arguments: Text = ""


@dataclass(frozen=True, slots=True)
class AssistantDelta:
    """What one token adds to its message, once that is certain: what may yet turn out to be a call waits."""

    content: Text = ""
    reasoning_content: Text = ""
    tool_calls: Annotated[tuple[AssistantCallDelta, ...], MaxLength(65_536)] = ()


@dataclass(frozen=True, slots=True)
class AssistantCall:
    id: Name
    name: Name
    arguments: Text  # JSON, unless the model erred or was cut


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """A whole one: the joined deltas, and what waited until the end. `partial`: it is too long for one message of NATS,
    so it is the text of all tokens alone that has it."""

    finish_reason: Name  # as OpenAI's: stop, length or tool_calls
    content: Text = ""
    reasoning_content: Text = ""
    tool_calls: Annotated[tuple[AssistantCall, ...], MaxLength(65_536)] = ()
    partial: bool = False
