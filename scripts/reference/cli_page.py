"""docs/reference/cli.md: the commands of `kvfleet`, from typer and argparse."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer

from kvfleet.cli.commands import app
from kvfleet.cli.main import PROCESS_COMMANDS
from kvfleet.placement.simulate.main import flags
from scripts.reference.markdown import code, head, table, written


def page() -> str:
    lines = head("Command line", "the commands themselves; `kvfleet COMMAND --help` says the same")
    for words, command in _commands(("kvfleet",), typer.main.get_command(app)):
        lines += _command(words, command)
    return written(lines)


def _commands(words: tuple[str, ...], group: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands((*words, name), command)
        else:
            yield (*words, name), command


def _command(words: tuple[str, ...], command: Any) -> Iterator[str]:
    name = words[-1]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
    shown = " ".join((*words, *(one.name.upper() for one in arguments if not one.metavar), "[OPTIONS]"))
    shown += "".join(f" [{one.metavar}...]" for one in arguments if one.metavar)  # what comes behind the options
    yield from (f"## {' '.join(words)}", "")
    if len(words) == 2 and name in PROCESS_COMMANDS:
        yield from (PROCESS_COMMANDS[name].told, "")
        if name == "simulate":
            yield from _argparse(flags())
        else:
            yield from (f"Its flags are [its settings](settings.md#{name}).", "")
        return
    yield from (inspect.cleandoc(command.help or ""), "")
    yield from (f"`{shown}`", "")
    yield from table(("argument", ""), ((code(one.name.upper()), getattr(one, "help", "") or "") for one in arguments))
    yield from table(
        ("option", "value", "default", ""),
        ((_names(one), _value(one), _default(one.default), _told(one)) for one in options),
    )


def _names(option: Any) -> str:
    return ", ".join(code(one) for one in (*option.opts, *option.secondary_opts))


def _value(option: Any) -> str:
    if option.is_flag:
        return ""
    if option.metavar:
        return code(option.metavar)
    kind = option.type_descriptor.annotation
    while kinds := [one for one in get_args(kind) if one is not NoneType and get_origin(kind) is not Literal]:
        (kind,) = kinds  # of a list, or of what may be absent
    if get_origin(kind) is Literal:
        return ", ".join(code(one) for one in get_args(kind))
    if issubclass(kind, Enum):
        return ", ".join(code(str(one.value)) for one in kind)
    return {"str": "text", "int": "integer", "Path": "path"}.get(kind.__name__, kind.__name__)


def _default(value: Any) -> str:
    if value is None or value is False or value == () or callable(value) or "UNSET" in repr(value).upper():
        return ""
    return code(str(value.value if isinstance(value, Enum) else value))


def _told(option: Any) -> str:
    told = option.help or ""
    return f"{told} (`{option.envvar}`)" if option.envvar else told


def _argparse(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (parser.description or "", "")
    for group in parser._action_groups:
        actions = [one for one in group._group_actions if one.option_strings and one.dest != "help"]
        if not actions:
            continue
        yield from (f"**{group.title}**", "")
        yield from table(
            ("option", "value", "default", ""),
            (
                (
                    ", ".join(code(one) for one in action.option_strings),
                    _argument(action),
                    code(f"{action.default:g}") if type(action.default) in (int, float) else "",
                    (action.help or "").replace("%%", "%"),
                )
                for action in actions
            ),
        )


def _argument(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices:
        return ", ".join(code(str(one)) for one in action.choices)
    return code(str(action.metavar or action.dest.upper()))
