"""Chat templates, rendered as by transformers' `apply_chat_template(..., tokenize=False)`, which a test checks. Pure
but for the clock, where the time is not passed in. Templates come from model folders and are not trusted, hence the
immutable sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvproto.errors import InvalidRequest
from kvproto.messages import Bundle


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainDict:
    """`dict(...)` without the class itself, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, refusing names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=...) works
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **kw: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **kw)


class ChatTemplate:
    """Raises InvalidRequest at construction if the source does not compile."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception,
            dict=_PlainDict(),
            namespace=_Namespace,
        )
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateError as error:
            raise InvalidRequest(f"the model's chat template does not compile: {error}", field="model") from None

    def render(
        self, messages: list[dict[str, Any]], values: Mapping[str, Any] = {}, now: datetime | None = None
    ) -> str:
        """`values`: further ones, such as tools. `now`: for templates that tell the date. Raises InvalidRequest if the
        template refuses these messages."""
        now = now or datetime.now()
        usual = {"tools": None, "documents": None, "strftime_now": now.strftime}
        fixed = {**self._special_tokens, "messages": messages, "add_generation_prompt": True}
        try:
            return self._template.render({**usual, **values, **fixed})
        except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
            why = f"the model's chat template refuses them: {str(error)[:300]}"
            raise InvalidRequest(why, field="messages") from None


class NoTemplate:
    """Completions work all the same."""

    def __init__(self, why: str) -> None:
        self._why = why

    def render(self, messages: object, values: object = None, now: object = None) -> str:
        raise InvalidRequest(self._why, field="model")


def template_of(bundle: Bundle) -> ChatTemplate | NoTemplate:
    if not bundle.chat_template:
        return NoTemplate("this model has no chat template, use /v1/completions")
    special = dict(bundle.special_tokens)
    for name, token in (("bos_token", bundle.bos_token), ("eos_token", bundle.eos_token)):
        if token is not None:
            special.setdefault(name, token)
    try:
        return ChatTemplate(bundle.chat_template, special)
    except InvalidRequest as error:
        return NoTemplate(error.message)
