"""Tools, as OpenAI's clients say them: what the template is told, what must be called, and what may not. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from kvchat.tool_grammar import Tool
from kvproto.errors import InvalidRequest
from kvservice.fields import Flag

MAX_TOOLS = 1024

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    type: Literal["function"]
    function: FunctionSpec

    def as_template_value(self) -> dict[str, Any]:
        said = self.function
        told = {"name": said.name, "description": said.description, "parameters": said.parameters}
        return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class NamedFunction:
    name: str


@dataclass(frozen=True, slots=True)
class NamedTool:
    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True, slots=True)
class AllowedTools:
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[NamedTool, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class AllowedChoice:
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`told` to the template. `callable`: what may be called, of which something `must` be. `is_bound`: a grammar keeps
    calls to their schemas, also where none must be."""

    told: tuple[dict[str, Any], ...]
    callable: tuple[Tool, ...]
    must_call: bool
    parallel: bool
    is_bound: bool


@dataclass(frozen=True, slots=True)
class ToolAsk:
    tools: Annotated[tuple[ToolSpec, ...], Field(max_length=MAX_TOOLS, fail_fast=True)] = ()
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: Flag | None = None
    plan: SkipJsonSchema[ToolPlan | None] = None  # made of the others; None without tools

    def __post_init__(self) -> None:
        """Raises InvalidRequest naming the field."""
        object.__setattr__(self, "plan", self._planned())

    def _planned(self) -> ToolPlan | None:
        choice = self.tool_choice
        if not self.tools:
            if choice not in (None, "none", "auto"):
                raise InvalidRequest("only allowed when tools are given", field="tool_choice")
            return None
        tools = {one.function.name: _tool(one.function, at) for at, one in enumerate(self.tools)}
        if len(tools) < len(self.tools):
            raise InvalidRequest("each must have a name of its own", field="tools")
        if isinstance(choice, NamedTool | AllowedChoice):
            chosen = (choice,) if isinstance(choice, NamedTool) else choice.allowed_tools.tools
            for one in chosen:
                if one.function.name not in tools:
                    raise InvalidRequest(f"no tool is called {one.function.name[:64]!r}", field="tool_choice")
            callable_ = [tools[name] for name in dict.fromkeys(one.function.name for one in chosen)]
        else:
            callable_ = [] if choice == "none" else [*tools.values()]
        must_call = choice == "required" or isinstance(choice, NamedTool)
        must_call |= isinstance(choice, AllowedChoice) and choice.allowed_tools.mode == "required"
        return ToolPlan(
            told=tuple(one.as_template_value() for one in self.tools),
            callable=tuple(callable_),
            must_call=must_call,
            parallel=self.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
            is_bound=must_call or any(one.strict for one in callable_) or self.parallel_tool_calls is False,
        )


def _tool(said: FunctionSpec, at: int) -> Tool:
    parameters, field = said.parameters or {}, f"tools[{at}].function.parameters"
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidRequest("must be a schema of an object", field=field)
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise InvalidRequest("must be an object of schemas", field=f"{field}.properties")
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise InvalidRequest("must be a list of names", field=f"{field}.required")
    return Tool(said.name, parameters, strict=bool(said.strict))
