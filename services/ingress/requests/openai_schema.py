"""Bodies of the OpenAI routes as frozen dataclasses. Pure.

Fields that would change the answer and are not served are refused by name when they ask for anything but the default:
silence would be a wrong answer. So are fields that nobody knows, as OpenAI's servers do. Those that are ignored say
something about the caller, or ask for what is done anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfleet.ingress.requests.fields import (
    Body,
    BodyField,
    Schema,
    boolean,
    expected,
    ignored,
    integer,
    refuse_unserved,
    text,
    unserved,
)
from kvfleet.ingress.requests.placement_ask import ANYWHERE, PlacementAsk, PlacementFields, read_placement_ask
from kvfleet.ingress.requests.sampling_ask import ANY_COUNT, MAX_CHOICES, SamplingAsk, SamplingFields, read_sampling
from kvproto.errors import InvalidRequest

MAX_MODEL_CHARS = 256
MAX_SEQ_ID_CHARS = 1024
MAX_MESSAGES = 16_384
MAX_CHAT_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
ROLES = ("system", "developer", "user", "assistant")
UNSERVED_IN_MESSAGES = ("tool_calls", "function_call", "audio")


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


# ---------------------------------------------------------------------------------------------- values


def _read_stream_options(value: Any, name: str) -> bool:
    """Whether usage is wanted."""
    if type(value) is not dict:
        raise expected("an object", value, name)
    include = value.get("include_usage")
    if include is not None and type(include) is not bool:
        raise expected("a boolean", include, f"{name}.include_usage")
    return bool(include)


def _read_messages(messages: Any, name: str) -> tuple[ChatMessage, ...]:
    if type(messages) is not list:
        raise expected("a list", messages, name)
    if not messages:
        raise InvalidRequest("must hold at least 1 message", field=name)
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages, got {len(messages)}", field=name)
    return tuple(_read_message(message, f"{name}[{i}]") for i, message in enumerate(messages))


def _read_message(message: Any, field: str) -> ChatMessage:
    if type(message) is not dict:
        raise expected("an object", message, field)
    role = message.get("role")
    if type(role) is not str or role not in ROLES:
        raise InvalidRequest(f"must be one of {', '.join(ROLES)}, got {str(role)[:40]!r}", field=f"{field}.role")
    for refused in UNSERVED_IN_MESSAGES:
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


def _read_prompt(prompt: Any, name: str) -> tuple[str | None, tuple[int, ...]]:
    if type(prompt) is list and prompt and type(prompt[0]) in (str, list):
        if len(prompt) > 1:
            raise InvalidRequest(f"at most 1 prompt per request, got {len(prompt)}", field=name)
        prompt = prompt[0]
    if type(prompt) is str:
        if not prompt:
            raise InvalidRequest("must not be empty", field=name)
        return prompt, ()
    if type(prompt) is not list:
        raise expected("a string or a list of token ids", prompt, name)
    if not prompt:
        raise InvalidRequest("must not be empty", field=name)
    for i, token in enumerate(prompt):
        if type(token) is not int:
            raise expected("a token id", token, f"{name}[{i}]")
    return None, tuple(prompt)


# ---------------------------------------------------------------------------------------------- tables

_PARTS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    },
}
_NOTHING: Schema = {"enum": [None, False, 0, "", [], {}]}


def _message_schema(roles: tuple[str, ...], *content: Schema) -> Schema:
    return {
        "type": "object",
        "required": ["role"] if len(content) > 2 else ["role", "content"],
        "properties": {
            "role": {"enum": list(roles)},
            "content": {"anyOf": list(content)},
            "name": {"type": ["string", "null"]},
            **dict.fromkeys(UNSERVED_IN_MESSAGES, _NOTHING),
        },
    }


_OTHER_ROLES = tuple(role for role in ROLES if role != "assistant")
_MESSAGE: Schema = {
    "anyOf": [
        _message_schema(_OTHER_ROLES, {"type": "string"}, _PARTS),
        _message_schema(("assistant",), {"type": "string"}, _PARTS, {"type": "null"}),
    ]
}
_IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer"}}
_TEXT: Schema = {"type": "string", "minLength": 1}
_PROMPT: Schema = {"anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "maxItems": 1,
                                           "items": {"anyOf": [_TEXT, _IDS]}}]}  # fmt: skip


class OpenAiFields(SamplingFields, PlacementFields):
    model = text("model", MAX_MODEL_CHARS, required=True)
    stream = boolean("stream")
    stream_options = BodyField(
        "stream_options",
        {"type": "object", "properties": {"include_usage": {"type": ["boolean", "null"]}}},
        _read_stream_options,
    )
    exact = boolean("exact")
    service_tier = unserved("service_tier", "auto", "default")
    user = ignored("user")
    safety_identifier = ignored("safety_identifier")
    metadata = ignored("metadata")
    store = ignored("store")
    prompt_cache_key = ignored("prompt_cache_key")
    # of vLLM's servers
    skip_special_tokens = unserved("skip_special_tokens", True)
    spaces_between_special_tokens = unserved("spaces_between_special_tokens", True)
    include_stop_str_in_output = unserved("include_stop_str_in_output", False)
    use_beam_search = unserved("use_beam_search", False)
    length_penalty = unserved("length_penalty", 1.0)
    bad_words = unserved("bad_words", [])
    allowed_token_ids = unserved("allowed_token_ids")
    truncate_prompt_tokens = unserved("truncate_prompt_tokens")
    prompt_logprobs = unserved("prompt_logprobs")
    structured_outputs = unserved("structured_outputs")
    guided_json = unserved("guided_json")
    guided_regex = unserved("guided_regex")
    guided_choice = unserved("guided_choice")
    guided_grammar = unserved("guided_grammar")


class ChatFields(OpenAiFields):
    messages = BodyField(
        "messages", {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGE}, _read_messages, True
    )
    max_completion_tokens = integer("max_completion_tokens", 1, ANY_COUNT)
    logprobs = boolean("logprobs")
    top_logprobs = integer("top_logprobs", 0, MAX_CHAT_LOGPROBS)
    seq_id = text("seq_id", MAX_SEQ_ID_CHARS)
    tools = unserved("tools", [])
    tool_choice = unserved("tool_choice", "none", "auto")
    functions = unserved("functions", [])
    function_call = unserved("function_call", "none", "auto")
    response_format = unserved("response_format", {"type": "text"})
    best_of = unserved("best_of", 1)
    modalities = unserved("modalities", ["text"])
    audio = unserved("audio")
    prediction = unserved("prediction")
    web_search_options = unserved("web_search_options")
    reasoning_effort = unserved("reasoning_effort")
    verbosity = unserved("verbosity")
    parallel_tool_calls = ignored("parallel_tool_calls")
    # of vLLM's servers
    chat_template = unserved("chat_template")
    chat_template_kwargs = unserved("chat_template_kwargs", {})
    documents = unserved("documents", [])
    add_generation_prompt = unserved("add_generation_prompt", True)
    continue_final_message = unserved("continue_final_message", False)
    add_special_tokens = unserved("add_special_tokens", False)
    echo = unserved("echo", False)


class CompletionFields(OpenAiFields):
    prompt = BodyField("prompt", _PROMPT, _read_prompt, True)
    logprobs = integer("logprobs", 0, MAX_COMPLETION_LOGPROBS)
    best_of = integer("best_of", 1, MAX_CHOICES)
    echo = unserved("echo", False)
    suffix = unserved("suffix", "")
    add_special_tokens = unserved("add_special_tokens", True)


# ---------------------------------------------------------------------------------------------- bodies


def read_chat(body: Body) -> ChatAsk:
    """Raises InvalidRequest naming the field."""
    fields = ChatFields
    refuse_unserved(body, fields)
    named = body.get(fields.max_completion_tokens.name) is not None
    limit = fields.max_completion_tokens if named else fields.max_tokens
    stream, include_usage = _read_stream(body)
    return ChatAsk(
        model=fields.model.need(body),
        messages=fields.messages.need(body),
        sampling=read_sampling(body, limit=limit, logprobs=_read_chat_logprobs(body)),
        stream=stream,
        include_usage=include_usage,
        seq_id=fields.seq_id.read(body),
        placement=read_placement_ask(body),
        exact=fields.exact.read(body, False),
    )


def read_completion(body: Body) -> CompletionAsk:
    """Raises InvalidRequest naming the field."""
    fields = CompletionFields
    refuse_unserved(body, fields)
    stream, include_usage = _read_stream(body)
    prompt, prompt_ids = fields.prompt.need(body)
    sampling = read_sampling(body, logprobs=fields.logprobs.read(body))
    best_of = fields.best_of.read(body)
    if best_of not in (None, 1, sampling.n):
        raise InvalidRequest(f"only n, {sampling.n}, is supported by this server, got {best_of}", field="best_of")
    return CompletionAsk(
        model=fields.model.need(body),
        prompt=prompt,
        prompt_ids=prompt_ids,
        sampling=sampling,
        stream=stream,
        include_usage=include_usage,
        placement=read_placement_ask(body),
        exact=fields.exact.read(body, False),
    )


def _read_chat_logprobs(body: Body) -> int | None:
    """Alternatives per token, 0 for the token's own log probability alone; None where none are asked for."""
    wanted = ChatFields.logprobs.read(body, False)
    top = ChatFields.top_logprobs.read(body, 0)
    if top and not wanted:
        raise InvalidRequest("only allowed when logprobs is true", field="top_logprobs")
    return top if wanted else None


def _read_stream(body: Body) -> tuple[bool, bool]:
    """Whether events are wanted, and usage with them."""
    stream = OpenAiFields.stream.read(body, False)
    include_usage = OpenAiFields.stream_options.read(body)
    if include_usage is not None and not stream:
        raise InvalidRequest("only allowed when stream is true", field="stream_options")
    return stream, bool(include_usage)


def check_vocabulary(ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id the model does not know."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        i = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequest(f"must be within [0, {vocab_size - 1}], got {ids[i]}", field=f"prompt[{i}]")
