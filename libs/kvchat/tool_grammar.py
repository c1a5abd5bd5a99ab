"""Grammars that make a model call tools in the way of its format, whatever it has learnt. Pure.

Arguments are of their schemas, written as `json.dumps` writes them. Marks that are tokens of their own are named by id:
no text can stand for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvchat.formats import deepseek, harmony, hermes, mistral, think
from kvproto.closed_schema import close
from kvproto.errors import InvalidRequest
from kvproto.messages import Grammar, GrammarForm

Schema = Mapping[str, Any]
_STYLE = {"x-guidance": {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}}
_ANY = {"type": "object"}
_START = re.compile(r"^start\s*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Schema = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model's template has its format written. `special`: ids of the marks that are tokens of their own."""

    template: str = ""
    special: Mapping[str, int] = field(default_factory=dict)

    def text(self, said: str) -> str:
        """A Lark expression for a text with marks in it."""
        marks = sorted((mark for mark in self.special if mark in said), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", said) if marks else [said]
        return " ".join(self._part(one) for one in parts if one) or '""'

    def _part(self, said: str) -> str:
        return f"<[{self.special[said]}]>" if said in self.special else json.dumps(said, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Form:
    """A message of calls: `mark`, calls with `again` between them, `end`. Text may come before the mark, or instead of
    all; where `starts`, a terminal, says how such a text begins, only instead."""

    call: Callable[[Tool, Dialect], str]
    mark: str = ""
    again: str = ""
    end: str = ""
    starts: str = ""


def grammar_of(
    name: str,
    tools: Sequence[Tool],
    dialect: Dialect,
    answer: Grammar | None = None,
    *,
    must_call: bool,
    parallel: bool,
) -> Grammar:
    """Of the format `name`. Without `must_call` any text may come instead, or before; with an `answer` that alone, and
    instead. Where none must be called, arguments are of the schemas of `strict` tools alone. Raises InvalidRequest for
    an answer that is no JSON."""
    tools = [tool if must_call or tool.strict else replace(tool, parameters={}) for tool in tools]
    form, text = _form(name, dialect), dialect.text
    parallel = parallel and name != "harmony"  # whose calls end the message
    rules = ["tail: call" + (f" ({text(form.again)} call)*" if parallel else "") + f" {text(form.end)}"]
    rules += ["call: " + " | ".join(f"call_{at}" for at in range(len(tools)))]
    rules += [f"call_{at}: {form.call(tool, dialect)}" for at, tool in enumerate(tools)]
    start = message = f"{text(form.mark)} tail"
    final = ""
    if name == "harmony":
        start = message = f"thought? {message}"
        final = f"thought? {text(harmony.ANSWERS)} "
        rules.append(f"thought: {text(harmony.THINKS)} ANY {text(harmony.SPEAKS)}")
    if answer is not None:
        rules.append(f"answer: {final}{_answer(answer)}")
        start = message if must_call else f"answer | {message}"
    elif not must_call and form.starts:
        rules.append(f"FREE: {form.starts}")
        start = f"FREE | {message}"
    elif not must_call and final:
        start = f"{final}ANY | {message}"
    elif not must_call:
        rules += [f"FREE: {_without(form.mark)}", _up_to("before", form.mark, dialect)]
        start = "FREE? | before tail"
    return Grammar(GrammarForm.LARK, "\n".join([f"start: {start}", *rules, "ANY: /(?s:.*)/"]), "tools")


def after_thought(grammar: Grammar, dialect: Dialect, *, begun: bool) -> Grammar:
    """The same, behind reasoning: where it has `begun` it must end first, else there may be some."""
    if grammar.form is GrammarForm.LARK and not _START.search(grammar.text):
        return grammar  # GBNF, which has no name for it
    rules = _START.sub("answer_:", grammar.text, count=1)
    if grammar.form is GrammarForm.REGEX:
        rules = f"answer_: /{_slashed(grammar.text)}/"
    elif grammar.form is GrammarForm.CHOICE:
        rules = "answer_: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(grammar.text))
    elif grammar.form is not GrammarForm.LARK:
        rules = f"answer_: {_answer(grammar)}"
    thought = "thought_ BLANK_?" if begun else f"({dialect.text(think.BEGIN)} thought_ BLANK_?)?"
    parts = [f"start: {thought} answer_", rules, _up_to("thought_", think.END, dialect), "BLANK_: /\\s{1,8}/"]
    if "ANY:" not in rules:
        parts.append("ANY: /(?s:.*)/")
    return Grammar(GrammarForm.LARK, "\n".join(parts), grammar.said)


def _up_to(rule: str, mark: str, dialect: Dialect) -> str:
    """Text, and the mark. Else the text would be as long as can be, with a part of the mark in it."""
    if mark in dialect.special or mark.startswith(tuple(dialect.special)):
        return f"{rule}: ANY {dialect.text(mark)}"
    return f"{rule}[lazy]: /(?s:.*){_slashed(re.escape(mark))}/"


def _slashed(pattern: str) -> str:
    return re.sub(r"(?<!\\)/", r"\\/", pattern)


def _without(mark: str) -> str:
    return f"/(?s:.+)/ & ~/(?s:.*){_slashed(re.escape(mark))}(?s:.*)/"


def _form(name: str, dialect: Dialect) -> _Form:
    if name == "hermes":
        return _Form(_hermes, hermes.BEGIN, again=f"\n{hermes.BEGIN}")
    if name == "llama":
        return _Form(_llama, again="; ", starts=r"/[^{\s<](?s:.*)/")
    if name == "pythonic":
        return _Form(_pythonic, "[", again=", ", end="]", starts=r"/[^\[\s<](?s:.*)/")
    if name == "harmony":
        return _Form(_harmony)
    if name == "deepseek":
        return _Form(_deepseek, deepseek.ALL_BEGIN, again="\n", end=deepseek.ALL_END)
    if mistral.ARGS in dialect.template:
        return _Form(_mistral_named, mistral.BEGIN, again=mistral.BEGIN)
    return _Form(_mistral, f"{mistral.BEGIN}[", again=", ", end="]")


def _answer(answer: Grammar) -> str:
    if answer.form is GrammarForm.JSON_OBJECT:
        return _json(_ANY)
    if answer.form is not GrammarForm.JSON_SCHEMA:
        raise InvalidRequest("cannot be had together with tools", field=answer.said)
    try:
        schema = json.loads(answer.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"is no JSON: {error}", field=answer.said) from None
    if not isinstance(schema, dict):
        raise InvalidRequest("a schema must be an object", field=answer.said)
    return _json(schema)


def _json(schema: Schema | bool) -> str:
    """`schema`: true allows anything, and false nothing, as JSON schemas have it."""
    said = close(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    return f"%json {json.dumps({**said, **_STYLE}, ensure_ascii=False)}"


def _arguments(tool: Tool) -> str:
    return _json(tool.parameters or _ANY)


def _object(tool: Tool, key: str, dialect: Dialect) -> str:
    head = dialect.text(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
    return f"{head} {_arguments(tool)} {dialect.text('}')}"


def _hermes(tool: Tool, dialect: Dialect) -> str:
    return f"{dialect.text(chr(10))} {_object(tool, 'arguments', dialect)} {dialect.text(chr(10) + hermes.END)}"


def _llama(tool: Tool, dialect: Dialect) -> str:
    return _object(tool, "parameters", dialect)


def _mistral(tool: Tool, dialect: Dialect) -> str:
    return _object(tool, "arguments", dialect)


def _mistral_named(tool: Tool, dialect: Dialect) -> str:
    return f"{dialect.text(f'{tool.name}{mistral.ARGS}')} {_arguments(tool)}"


def _deepseek(tool: Tool, dialect: Dialect) -> str:
    begin, end = f"{deepseek.BEGIN}{tool.name}{deepseek.SEPARATOR}", deepseek.END
    if f"{deepseek.FENCE}json" in dialect.template:
        begin = f"{deepseek.BEGIN}function{deepseek.SEPARATOR}{tool.name}\n{deepseek.FENCE}json\n"
        end = f"\n{deepseek.FENCE}{deepseek.END}"
    return f"{dialect.text(begin)} {_arguments(tool)} {dialect.text(end)}"


def _harmony(tool: Tool, dialect: Dialect) -> str:
    begin = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
    return f"{dialect.text(begin)} {_arguments(tool)}"


def _pythonic(tool: Tool, dialect: Dialect) -> str:
    """JSON's literals stand for Python's. Required arguments come first."""
    properties: Mapping[str, Schema | bool] = tool.parameters.get("properties", {})
    required = [one for one in tool.parameters.get("required", ()) if one in properties]
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    known = {
        name: f"{json.dumps(f'{name}=')} {_json({**said, **shared} if isinstance(said, Mapping) else said)}"
        for name, said in properties.items()
    }
    must = ' ", " '.join(known[one] for one in required)
    may = " ".join(f'(", " {text})?' for one, text in known.items() if one not in required)
    if not must and known:  # the first of them has no comma
        rest = list(known.values())
        may = " | ".join(
            " ".join([text, *(f'(", " {later})?' for later in rest[at + 1 :])]) for at, text in enumerate(rest)
        )
        may = f"({may})?"
    return " ".join(filter(None, (dialect.text(f"{tool.name}("), must, may, '")"')))
