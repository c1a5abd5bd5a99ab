"""A chat as a worker takes it: rendered, kept to its tools, and its message read from what the model writes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from kvchat.chat_template import ChatTemplate, NoTemplate, template_of
from kvchat.conversation import read_conversation
from kvchat.message_builder import MessageBuilder
from kvchat.message_format import MessageReading, format_of_message
from kvchat.messages import template_values
from kvfleet.worker.port.engine_port import TextPort
from kvproto.messages import Bundle, Chat, GenerateRequest, Sampling


@dataclass(frozen=True, slots=True)
class TakenChat:
    """`sampling` keeps the model to what must be called. `builders`, of each choice, have read what earlier attempts
    said."""

    ids: tuple[int, ...]
    sampling: Sampling
    builders: tuple[MessageBuilder, ...]


@dataclass(frozen=True)
class ChatIntake:
    bundle: Bundle
    text: TextPort
    _template: ChatTemplate | NoTemplate = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_template", template_of(self.bundle))

    def take(self, request: GenerateRequest, chat: Chat) -> TakenChat:
        """Takes long for a long one. Raises InvalidRequest naming the field."""
        asked = read_conversation(chat)
        plan, grammar = asked.tools.plan, request.sampling.grammar
        written = format_of_message(plan, self.bundle, self.text.special, grammar)
        now = datetime.fromtimestamp(chat.unix_s, UTC)
        prompt = self._template.render(template_values(asked.messages), asked.template_values, now)
        ids = self.text.encode(prompt, begins=False, field="messages")
        sampling = request.sampling if written is None else written.bind(request.sampling, prompt)
        reading, builders = MessageReading() if written is None else written.reading(prompt), []
        for choice in range(sampling.n):
            builder = MessageBuilder(reading(), request.request, choice)
            before = request.continuation(choice)
            said = self.text.generated(ids, before.output_ids, skip_special=sampling.skip_special_tokens)
            builder.read(said[: before.text_sent])
            builders.append(builder)
        return TakenChat(ids, sampling, tuple(builders))
