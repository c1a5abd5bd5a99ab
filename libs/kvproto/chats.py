"""What producers say of a chat, as the one text that goes to a worker. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvproto.errors import InvalidRequest
from kvproto.ids import base32
from kvproto.messages import Chat

FIELDS = ("messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs")


def chat_of(
    messages: Any,
    *,
    tools: Any = None,
    tool_choice: Any = None,
    parallel_tool_calls: Any = None,
    reasoning_effort: Any = None,
    chat_template_kwargs: Any = None,
    unix_s: int = 0,
) -> Chat:
    """All as in OpenAI's chat completions. The worker checks it. Raises InvalidRequest for what is no JSON."""
    values = messages, tools, tool_choice, parallel_tool_calls, reasoning_effort, chat_template_kwargs
    said = zip(FIELDS, values, strict=True)
    fields = (f'"{name}":{_json(name, value)}' for name, value in said if value is not None)
    return Chat("{" + ",".join(fields) + "}", conversation_of(_spoken(messages)), unix_s)


def _json(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"is no JSON: {error}", field=name) from None
    return text


def conversation_of(spoken: Iterable[tuple[str, str]]) -> str:
    """A key of any turn of one chat, so that the chat stays where its blocks are: a hash of its messages, by role and
    text, up to and with the first that is no instruction."""
    hashed = hashlib.blake2b(digest_size=16)
    for role, text in spoken:
        hashed.update(f"{role}\0{len(text)}\0{text}".encode("utf-8", "surrogatepass"))
        if role != "system":
            break
    return "chat-" + base32(hashed.digest())


def _spoken(messages: Any) -> Iterator[tuple[str, str]]:
    """Of messages that nobody has checked yet."""
    for one in messages if isinstance(messages, list | tuple) else ():
        said = one if isinstance(one, Mapping) else {}
        role, content = said.get("role"), said.get("content")
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in _parts(content)]
        yield "system" if role == "developer" else str(role), "".join(part for part in parts if isinstance(part, str))


def _parts(content: Any) -> Iterable[Any]:
    return content if isinstance(content, list | tuple) else (content,)
