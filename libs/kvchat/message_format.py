"""How a model writes a message, and what a chat wants of it: what reads it, and what keeps the model to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvchat.formats import FORMATS, format_of
from kvchat.formats.own import own_format
from kvchat.formats.think import BEGIN, plain, thinking
from kvchat.source import MessageReader
from kvchat.tool_grammar import Dialect, Tool, after_thought, grammar_of
from kvchat.tools import ToolPlan
from kvproto.errors import InvalidRequest
from kvproto.messages import Bundle, Grammar, Sampling

HARMONY = "harmony"
PROMPT_END = 1024  # characters


@dataclass(frozen=True, slots=True)
class MessageReading:
    """Makes readers of a message's text: all that they need, without the model. Fields as `MessageFormat` has them;
    `prompt_end` may have the message's beginning."""

    tools: str = ""
    thinks: bool = False
    own: str = ""
    prompt_end: str = ""
    callable: tuple[Tool, ...] = ()

    def __call__(self) -> MessageReader:
        tools = {tool.name: tool.parameters for tool in self.callable}
        if self.own:
            return MessageReader(own_format(self.own).parse(self.prompt_end, tools), tools)
        parse = FORMATS.get(self.tools, plain)
        if self.thinks:
            parse = thinking(parse, begun=_has_begun(self.prompt_end))
        return MessageReader(parse, tools)


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """`tools`: of its calls; "" where there are none. `thinks`: its text begins with reasoning, or may. `own`: its
    tokenizer's, which reads all of it; "" where it is not read so."""

    plan: ToolPlan | None
    tools: str
    thinks: bool
    dialect: Dialect
    own: str = ""

    def reading(self, prompt: str) -> MessageReading:
        """Of a message after a rendered prompt."""
        callable_ = self.plan.callable if self.plan else ()
        return MessageReading(self.tools, self.thinks, self.own, prompt[-PROMPT_END:], callable_)

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


def _own_of(bundle: Bundle) -> str:
    """ "" for one of a later version than this."""
    try:
        own_format(bundle.response_schema)
    except ValueError:
        return ""
    return bundle.response_schema


def format_of_message(
    plan: ToolPlan | None, bundle: Bundle, special: Mapping[str, int], grammar: Grammar | None
) -> MessageFormat | None:
    """None: all is text. `special`: ids of the model's special tokens. `grammar`: the caller's. Raises InvalidRequest
    for tools, if the model's template knows none, or no format in which they can be enforced."""
    template = bundle.chat_template or ""
    name = bundle.tool_format or format_of(template)
    is_bound = grammar is not None or (plan is not None and plan.is_bound)
    own = "" if bundle.tool_format or is_bound else _own_of(bundle)
    if plan is not None and not name and not own:
        why = "this model's chat template knows none, nor was --tool-format said"
        if bundle.response_schema:
            why = "this model's format cannot be enforced: only its tokenizer describes it, nor was --tool-format said"
        raise InvalidRequest(why, field="tools")
    thinks = BEGIN in template
    if plan is None and not thinks and name != HARMONY and not own:
        return None
    return MessageFormat(plan, name if plan or name == HARMONY else "", thinks, Dialect(template, special), own)
