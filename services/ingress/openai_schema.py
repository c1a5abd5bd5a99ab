"""Bodies of the OpenAI routes as frozen dataclasses. Pure.

Unknown fields are ignored, as OpenAI's servers do. Fields that would change the answer and are not served are refused
by name when they ask for anything but the default: silence would be a wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvproto.errors import InvalidRequest
from services.ingress.fields import Body, boolean, expected, integer, required_text, text
from services.ingress.placement_ask import ANYWHERE, PlacementAsk, read_placement_ask
from services.ingress.sampling_ask import MAX_CHOICES, SamplingAsk, read_sampling

MAX_MODEL_CHARS = 256
MAX_SEQ_ID_CHARS = 1024
MAX_MESSAGES = 16_384
MAX_CHAT_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
ROLES = ("system", "developer", "user", "assistant")

# Field -> the values that ask for nothing special.
_COMMON_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
}
_CHAT_DEFAULTS: dict[str, tuple[Any, ...]] = {
    **_COMMON_DEFAULTS,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
}
_COMPLETION_DEFAULTS: dict[str, tuple[Any, ...]] = {
    **_COMMON_DEFAULTS,
    "echo": (False,),
    "suffix": ("",),
}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    name: str | None = None

    def as_template_value(self) -> dict[str, str]:
        value = {"role": self.role, "content": self.content}
        if self.name is not None:
            value["name"] = self.name
        return value


@dataclass(frozen=True, slots=True)
class ChatAsk:
    model: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingAsk
    stream: bool = False
    include_usage: bool = False
    seq_id: str | None = None
    placement: PlacementAsk = ANYWHERE
    exact: bool = False


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """Either `prompt` or `prompt_ids`."""

    model: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    sampling: SamplingAsk
    stream: bool = False
    include_usage: bool = False
    placement: PlacementAsk = ANYWHERE
    exact: bool = False


def read_chat(body: Body) -> ChatAsk:
    """Raises InvalidRequest naming the field."""
    _refuse(body, _CHAT_DEFAULTS)
    limit_field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    stream, include_usage = _read_stream(body)
    return ChatAsk(
        model=required_text(body, "model", MAX_MODEL_CHARS),
        messages=_read_messages(body),
        sampling=read_sampling(body, max_tokens_field=limit_field, logprobs=_read_chat_logprobs(body)),
        stream=stream,
        include_usage=include_usage,
        seq_id=read_seq_id(body),
        placement=read_placement_ask(body),
        exact=boolean(body, "exact", False),
    )


def read_completion(body: Body) -> CompletionAsk:
    """Raises InvalidRequest naming the field."""
    _refuse(body, _COMPLETION_DEFAULTS)
    stream, include_usage = _read_stream(body)
    prompt, prompt_ids = _read_prompt(body)
    sampling = read_sampling(body, logprobs=integer(body, "logprobs", 0, MAX_COMPLETION_LOGPROBS))
    best_of = integer(body, "best_of", 1, MAX_CHOICES)
    if best_of not in (None, 1, sampling.n):
        raise InvalidRequest(f"only n, {sampling.n}, is supported by this server, got {best_of}", field="best_of")
    return CompletionAsk(
        model=required_text(body, "model", MAX_MODEL_CHARS),
        prompt=prompt,
        prompt_ids=prompt_ids,
        sampling=sampling,
        stream=stream,
        include_usage=include_usage,
        placement=read_placement_ask(body),
        exact=boolean(body, "exact", False),
    )


def read_seq_id(body: Body) -> str | None:
    value = text(body, "seq_id", MAX_SEQ_ID_CHARS)
    if value == "":
        raise InvalidRequest("must not be empty", field="seq_id")
    return value


def _refuse(body: Body, defaults: dict[str, tuple[Any, ...]]) -> None:
    for name, allowed in defaults.items():
        value = body.get(name)
        if value is not None and not any(value == one and type(value) in _alike(one) for one in allowed):
            raise InvalidRequest("not supported by this server", field=name)


def _read_chat_logprobs(body: Body) -> int | None:
    """Alternatives per token, 0 for the token's own log probability alone; None where none are asked for."""
    wanted = boolean(body, "logprobs", False)
    top = integer(body, "top_logprobs", 0, MAX_CHAT_LOGPROBS)
    if top and not wanted:
        raise InvalidRequest("only allowed when logprobs is true", field="top_logprobs")
    return (top or 0) if wanted else None


def _alike(value: object) -> tuple[type, ...]:
    """0 and 0.0 are one default, but False is not 0."""
    return (int, float) if type(value) in (int, float) else (type(value),)


def _read_stream(body: Body) -> tuple[bool, bool]:
    stream = boolean(body, "stream", False)
    options = body.get("stream_options")
    if options is None:
        return stream, False
    if type(options) is not dict:
        raise expected("an object", options, "stream_options")
    if not stream:
        raise InvalidRequest("only allowed when stream is true", field="stream_options")
    include = options.get("include_usage")
    if include is not None and type(include) is not bool:
        raise expected("a boolean", include, "stream_options.include_usage")
    return stream, bool(include)


def _read_messages(body: Body) -> tuple[ChatMessage, ...]:
    messages = body.get("messages")
    if messages is None:
        raise InvalidRequest("missing", field="messages")
    if type(messages) is not list:
        raise expected("a list", messages, "messages")
    if not messages:
        raise InvalidRequest("must hold at least 1 message", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages, got {len(messages)}", field="messages")
    return tuple(_read_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _read_message(message: Any, field: str) -> ChatMessage:
    if type(message) is not dict:
        raise expected("an object", message, field)
    role = message.get("role")
    if type(role) is not str or role not in ROLES:
        raise InvalidRequest(f"must be one of {', '.join(ROLES)}, got {str(role)[:40]!r}", field=f"{field}.role")
    for refused in ("tool_calls", "function_call", "audio"):
        if message.get(refused):
            raise InvalidRequest("not supported by this server", field=f"{field}.{refused}")
    name = message.get("name")
    if name is not None and type(name) is not str:
        raise expected("a string", name, f"{field}.name")
    content = _read_content(message.get("content"), f"{field}.content", optional=role == "assistant")
    return ChatMessage("system" if role == "developer" else role, content, name)


def _read_content(content: Any, field: str, *, optional: bool) -> str:
    if type(content) is str:
        return content
    if content is None and optional:
        return ""
    if type(content) is not list:
        raise expected("a string or a list of text parts", content, field)
    pieces = []
    for i, part in enumerate(content):
        if type(part) is not dict:
            raise expected("an object", part, f"{field}[{i}]")
        if part.get("type") != "text":
            raise InvalidRequest("only parts of type 'text' are supported", field=f"{field}[{i}].type")
        piece = part.get("text")
        if type(piece) is not str:
            raise expected("a string", piece, f"{field}[{i}].text")
        pieces.append(piece)
    return "".join(pieces)


def _read_prompt(body: Body) -> tuple[str | None, tuple[int, ...]]:
    prompt = body.get("prompt")
    if prompt is None:
        raise InvalidRequest("missing", field="prompt")
    if type(prompt) is list and prompt and type(prompt[0]) in (str, list):
        if len(prompt) > 1:
            raise InvalidRequest(f"at most 1 prompt per request, got {len(prompt)}", field="prompt")
        prompt = prompt[0]
    if type(prompt) is str:
        if not prompt:
            raise InvalidRequest("must not be empty", field="prompt")
        return prompt, ()
    if type(prompt) is not list:
        raise expected("a string or a list of token ids", prompt, "prompt")
    if not prompt:
        raise InvalidRequest("must not be empty", field="prompt")
    for i, token in enumerate(prompt):
        if type(token) is not int:
            raise expected("a token id", token, f"prompt[{i}]")
    return None, tuple(prompt)


def check_vocabulary(ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id the model does not know."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        i = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequest(f"must be within [0, {vocab_size - 1}], got {ids[i]}", field=f"prompt[{i}]")
