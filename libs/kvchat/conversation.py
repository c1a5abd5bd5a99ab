"""A chat as clients ask for its next message, over HTTP and over NATS: messages, tools, and what the template is told
besides. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from kvchat.messages import ChatMessage
from kvchat.tools import ToolAsk
from kvproto.errors import InvalidRequest
from kvproto.messages import Chat
from kvservice.fields import BodyForm, parse_body

MAX_MESSAGES = 16_384
OF_TEMPLATES = frozenset(("messages", "tools", "documents", "add_generation_prompt", "reasoning_effort"))


def _without_fields(said: dict[str, Any]) -> dict[str, Any]:
    for name in OF_TEMPLATES.intersection(said):
        raise InvalidRequest("has a field of its own", field=f"chat_template_kwargs.{name}")
    return said


TemplateValues = Annotated[dict[str, Any], AfterValidator(_without_fields)]


@dataclass(frozen=True, kw_only=True)  # no slots: a class may have only one base with them
class Conversation:
    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: ToolAsk
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateValues = field(default_factory=dict)

    @property
    def template_values(self) -> dict[str, Any]:
        """What the template gets besides the messages."""
        values = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            values["reasoning_effort"] = self.reasoning_effort
        if self.tools.plan is not None:
            values["tools"] = [*self.tools.plan.told]
        return values


_FORM = BodyForm(Conversation, {})


def read_conversation(chat: Chat) -> Conversation:
    """As the HTTP route reads these fields. Raises InvalidRequest naming the field."""
    return _FORM.read(parse_body(chat.text.encode("utf-8", "surrogatepass")))
