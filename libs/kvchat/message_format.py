"""How a model writes a message, and what a chat wants of it: what reads it, and what keeps the model to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvchat.formats import FORMATS, format_of
from kvchat.formats.think import BEGIN, plain, thinking
from kvchat.source import MessageReader
from kvchat.tool_grammar import Dialect, after_thought, grammar_of
from kvchat.tools import ToolPlan
from kvproto.errors import InvalidRequest
from kvproto.messages import Bundle, Sampling

HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class MessageReading:
    """Makes readers of a message's text: all that they need, without the model. `names`: of what may be called."""

    tools: str = ""
    thinks: bool = False
    begun: bool = False  # to think, by the template
    names: tuple[str, ...] = ()

    def __call__(self) -> MessageReader:
        parse = FORMATS.get(self.tools, plain)
        return MessageReader(thinking(parse, begun=self.begun) if self.thinks else parse, self.names)


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """`tools`: of its calls; "" where there are none. `thinks`: its text begins with reasoning, or may."""

    plan: ToolPlan | None
    tools: str
    thinks: bool
    dialect: Dialect

    def reading(self, prompt: str) -> MessageReading:
        """Of a message after a rendered prompt."""
        names = tuple(tool.name for tool in self.plan.callable) if self.plan else ()
        return MessageReading(self.tools, self.thinks, _has_begun(prompt), names)

    def bind(self, sampling: Sampling, prompt: str) -> Sampling:
        """Raises InvalidRequest for a grammar of the caller's that cannot be had together with tools."""
        plan, grammar = self.plan, sampling.grammar
        if plan is not None and plan.callable and (plan.is_bound or grammar is not None):
            must = {"must_call": plan.must_call, "parallel": plan.parallel}
            grammar = grammar_of(self.tools, plan.callable, self.dialect, grammar, **must)
        if grammar is not None and self.thinks:
            grammar = after_thought(grammar, self.dialect, begun=_has_begun(prompt))
        return replace(sampling, grammar=grammar, skip_special_tokens=False)


def _has_begun(prompt: str) -> bool:
    """To reason: some templates write the mark themselves."""
    return prompt.rstrip().endswith(BEGIN)


def format_of_message(plan: ToolPlan | None, bundle: Bundle, special: Mapping[str, int]) -> MessageFormat | None:
    """None: all is text. `special`: ids of the model's special tokens. Raises InvalidRequest for tools, if the model's
    template knows none."""
    template = bundle.chat_template or ""
    name = bundle.tool_format or format_of(template)
    if plan is not None and not name:
        raise InvalidRequest("this model's chat template knows none, nor was --tool-format said", field="tools")
    thinks = BEGIN in template
    if plan is None and not thinks and name != HARMONY:
        return None
    return MessageFormat(plan, name if plan or name == HARMONY else "", thinks, Dialect(template, special))
