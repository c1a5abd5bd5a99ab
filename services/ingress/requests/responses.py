"""Bodies of /v1/responses, as OpenAI's clients send them, and their items, read as a chat's messages. Pure.

instructions                                a system message
reasoning, message, function_call           in a row: one message of the assistant
function_call_output                        a message of the role tool
item_reference                              an item of a stored response, by its id
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from kvchat.conversation import MAX_MESSAGES, TemplateValues
from kvchat.messages import ChatMessage
from kvchat.tools import (
    AllowedChoice,
    AllowedTools,
    FunctionName,
    FunctionSpec,
    NamedFunction,
    NamedTool,
    ToolAsk,
    ToolSpec,
)
from kvfleet.ingress.requests.asks import (
    ANYWHERE,
    MAX_TEMPERATURE,
    Count,
    FleetAsk,
    PlacementAsk,
    SamplingAsk,
    Share,
    Stops,
)
from kvfleet.ingress.requests.bodies import (
    MAX_CHAT_LOGPROBS,
    MAX_MODEL_CHARS,
    ChatAsk,
)
from kvfleet.ingress.requests.grammars import GrammarAsk
from kvfleet.ingress.requests.response_items import (
    Item,
    ItemKind,
    MessageItem,
    ReferenceItem,
    messages_of,
    without_nulls,
)
from kvproto.errors import InvalidRequest
from kvproto.messages import Grammar, GrammarForm, Overflow
from kvproto.response_format import grammar_of_schema
from kvservice.fields import Body, BodyForm, Flag, Number, Whole

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class FunctionTool:
    type: Literal["function"]
    name: FunctionName
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: Flag | None = None


@dataclass(frozen=True, slots=True)
class ChosenTool:
    type: Literal["function"]
    name: str


@dataclass(frozen=True, slots=True)
class ChosenTools:
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[ChosenTool, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class TextFormat:
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: Flag | None = None


@dataclass(frozen=True, slots=True)
class TextAsk:
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None

    @property
    def grammar(self) -> Grammar | None:
        """Raises InvalidRequest for a type that goes with a schema and has none, and the reverse."""
        said = self.format
        if said is None or said.type == "text":
            return None
        if (said.type == "json_schema") != (said.schema is not None):
            raise InvalidRequest("goes with the type json_schema, and no other", field="text.format.schema")
        if said.schema is None:
            return Grammar(GrammarForm.JSON_OBJECT, said="text.format")
        return grammar_of_schema(said.schema, "text.format.schema")


@dataclass(frozen=True, slots=True)
class ReasoningAsk:
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # there is none to give
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


@dataclass(frozen=True, slots=True)
class NumberedStream:
    include_obfuscation: Flag | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputAsk:
    """What a response is made of."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # also of what is in its fields

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[
            tuple[Item, ...],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            BeforeValidator(without_nulls),
        ]
    )
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[tuple[FunctionTool, ...], Field(max_length=1024, fail_fast=True)] = ()
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | ChosenTools | None = None
    parallel_tool_calls: Flag | None = None
    reasoning: ReasoningAsk | None = None
    text: TextAsk | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: TemplateValues = field(default_factory=dict)

    @property
    def items(self) -> tuple[ItemKind, ...]:
        return (MessageItem("user", self.input),) if isinstance(self.input, str) else self.input

    @property
    def references(self) -> set[str]:
        """Ids of items of other responses."""
        return {item.id for item in self.items if isinstance(item, ReferenceItem)}

    def chat(
        self, earlier: Iterable[ItemKind], named: Mapping[str, ItemKind], sampling: SamplingAsk, **more: Any
    ) -> ChatAsk:
        """`earlier`: items of the responses before it; `named`: what it refers to. Raises InvalidRequest."""
        items = [*earlier, *(named[one.id] if isinstance(one, ReferenceItem) else one for one in self.items)]
        told = [ChatMessage("system", self.instructions)] if self.instructions else []
        return ChatAsk(
            model=self.model,
            messages=(*told, *messages_of(items)),
            sampling=sampling,
            grammars=GrammarAsk(),
            tools=self.tool_ask(),
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            chat_template_kwargs=self.chat_template_kwargs,
            **more,
        )

    def tool_ask(self) -> ToolAsk:
        """Raises InvalidRequest naming the field."""
        specs = [
            ToolSpec("function", FunctionSpec(one.name, one.description, one.parameters, one.strict))
            for one in self.tools
        ]
        return ToolAsk(tuple(specs), _choice(self.tool_choice), self.parallel_tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFields(InputAsk):
    stream: Flag = False
    stream_options: NumberedStream | None = None
    store: Flag = True
    background: Flag = False
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=MAX_METADATA),
    ] = field(default_factory=dict)
    include: tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...] = ()
    max_output_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Whole(-1, 2**31 - 1)] | None = None
    top_logprobs: Annotated[int, Whole(0, MAX_CHAT_LOGPROBS)] | None = None
    seed: Annotated[int, Whole(-(2**63), 2**64 - 1)] | None = None
    stop: Annotated[tuple[str, ...], Stops] = ()
    ignore_eos: Flag = False
    user: str | None = None
    placement: PlacementAsk = ANYWHERE
    exact: Flag = False
    kvfleet: FleetAsk | None = None


_OTHERS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "max_tool_calls")),
    "service_tier": ("auto", "default"),
    **dict.fromkeys(("conversation", "prompt", "moderation", "context_management"), ()),
}
RESPONSES = BodyForm(ResponseFields, _OTHERS)
INPUT_TOKENS = BodyForm(InputAsk, dict.fromkeys(("conversation",), ()))


@dataclass(frozen=True, slots=True)
class ResponseAsk:
    """`body` as it came, of which it can be read again."""

    body: Body
    fields: ResponseFields
    sampling: SamplingAsk

    @property
    def model(self) -> str:
        return self.fields.model

    @property
    def stream(self) -> bool:
        return self.fields.stream

    @property
    def placement(self) -> PlacementAsk:
        return self.fields.placement

    @property
    def exact(self) -> bool:
        return self.fields.exact

    @property
    def kvfleet(self) -> FleetAsk | None:
        return self.fields.kvfleet

    def chat(self, earlier: Iterable[ItemKind], named: Mapping[str, ItemKind]) -> ChatAsk:
        """Raises as `InputAsk.chat` does."""
        more = {"stream": self.stream, "placement": self.placement, "exact": self.exact, "kvfleet": self.kvfleet}
        return self.fields.chat(earlier, named, self.sampling, **more)


def read_response(body: Body) -> ResponseAsk:
    """Raises InvalidRequest naming the field."""
    said = RESPONSES.read(body)
    if said.background and not said.store:
        raise InvalidRequest("only allowed when store is true", field="background")
    if said.stream_options is not None and not said.stream:
        raise InvalidRequest("only allowed when stream is true", field="stream_options")
    said.tool_ask()  # refuses what cannot be
    scored = said.top_logprobs is not None or LOGPROBS in said.include
    sampling = SamplingAsk(
        max_tokens=said.max_output_tokens,
        max_tokens_field="max_output_tokens",
        temperature=said.temperature,
        top_p=said.top_p,
        top_k=said.top_k,
        seed=said.seed,
        stop=said.stop,
        ignore_eos=said.ignore_eos,
        logprobs=(said.top_logprobs or 0) if scored else None,
        grammar=said.text.grammar if said.text is not None else None,
        overflow=Overflow.TRUNCATE_LEFT if said.truncation == "auto" else Overflow.ERROR,
    )
    return ResponseAsk(body, said, sampling)


def read_input(body: Body) -> ChatAsk:
    """Of /v1/responses/input_tokens. Raises InvalidRequest naming the field."""
    said = INPUT_TOKENS.read(body)
    for name in ("previous_response_id", *(["input"] if said.references else [])):
        if getattr(said, name) is not None:
            raise InvalidRequest("stored items cannot be counted: send them", field=name)
    return said.chat((), {}, SamplingAsk())


def _choice(
    said: Literal["none", "auto", "required"] | ChosenTool | ChosenTools | None,
) -> Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None:
    if isinstance(said, ChosenTool):
        return _named(said)
    if isinstance(said, ChosenTools):
        return AllowedChoice("allowed_tools", AllowedTools(said.mode, tuple(map(_named, said.tools))))
    return said


def _named(said: ChosenTool) -> NamedTool:
    return NamedTool("function", NamedFunction(said.name))
