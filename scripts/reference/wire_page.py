"""docs/reference/wire.md: subjects, messages, frames and error codes, from `kvproto`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

from kvproto import codec
from kvproto.errors import BY_CODE
from kvproto.subjects import Subjects
from scripts.reference.markdown import code, head, table, written
from scripts.reference.source import ModuleSource, bounded, docstring

MESSAGES = "libs/kvproto/messages"
MODULES = (  # from the first thing that is said of a request to the last
    ("Requests", "requests"),
    ("Chats", "chats"),
    ("Frames", "frames"),
    ("Members", "members"),
    ("Placement", "placement"),
    ("Between ingresses", "between_ingresses"),
    ("Administration", "admin"),
)
VOCABULARY = ModuleSource(f"{MESSAGES}/vocabulary.py")
NAMESPACE = "kvf"


def page() -> str:
    lines = head("Wire", "`libs/kvproto`: `subjects`, `messages`, `codec` and `errors`")
    lines += [docstring(ModuleSource("libs/kvproto/codec.py").tree).partition("\n\n")[2], ""]
    lines += [f"This version reads {codec.MIN_VERSION} to {codec.VERSION}.", ""]
    lines += ["## Subjects", "", f"Under the namespace `{NAMESPACE}`; `--namespace` gives another one.", ""]
    lines += table(("name", "subject"), ((code(name), code(subject)) for name, subject in _subjects()))
    lines += ["## Types", "", "Bounds are checked when a message is read, and the error names the field.", ""]
    constants = {one.name: one.default for one in VOCABULARY.fields(VOCABULARY.tree) if one.name.isupper()}
    aliases = (one for one in VOCABULARY.fields(VOCABULARY.tree) if one.name[0].isupper() and "[" in one.default)
    lines += table(
        ("type", "is", ""),
        ((code(one.name), code(bounded(_resolved(one.default, constants))), one.comment) for one in aliases),
    )
    for kind in filter(_is_enumeration, VOCABULARY.classes()):
        lines += [f"### {kind.name}", "", docstring(kind), ""]
        values = (one for one in VOCABULARY.fields(kind))
        lines += table(("value", ""), ((code(ast.literal_eval(one.default)), one.comment) for one in values))
    for title, module in MODULES:
        source = ModuleSource(f"{MESSAGES}/{module}.py")
        lines += [f"## {title}", "", docstring(source.tree), ""]
        if module == "frames":
            lines += table(("tag", "frame"), ((str(tag), code(kind.__name__)) for tag, kind in codec._TAGS.items()))
        for kind in source.classes():
            lines += _message(source, kind)
    lines += ["## Errors", "", "`retryable`: the same request may succeed on another worker.", ""]
    lines += table(
        ("code", "HTTP status", "retryable", "class"),
        (
            (code(one.code), str(one.http_status), "yes" if one.retryable else "", code(one.__name__))
            for one in BY_CODE.values()
        ),
    )
    return written(lines)


def _message(source: ModuleSource, kind: ast.ClassDef) -> Iterator[str]:
    yield from (f"### {kind.name}", "", docstring(kind), "")
    if _is_enumeration(kind):
        values = source.fields(kind)
        yield from table(("value", ""), ((code(ast.literal_eval(one.default)), one.comment) for one in values))
        return
    yield from table(
        ("field", "type", "default", ""),
        (
            (code(one.name), code(bounded(one.type)), code(_default(one.default)), one.comment)
            for one in source.fields(kind)
        ),
    )


def _is_enumeration(kind: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "StrEnum" for base in kind.bases)


def _resolved(text: str, constants: dict[str, str]) -> str:
    for name, value in constants.items():
        text = re.sub(rf"\b{name}\b", value, text)
    return text


def _default(text: str) -> str:
    return {"field(default_factory=dict)": "{}"}.get(text, text)


def _subjects() -> Iterator[tuple[str, str]]:
    """Each method called with the names of its parameters."""
    subjects = Subjects(NAMESPACE, "REGION")
    for name, method in inspect.getmembers(Subjects, inspect.isfunction):
        if name.startswith("_"):
            continue
        given = {parameter: parameter.upper() for parameter in list(inspect.signature(method).parameters)[1:]}
        subject = str(getattr(subjects, name)(**given))
        for parameter in {*given, "region"}:
            subject = subject.replace(parameter.upper(), f"<{parameter}>")
        yield name, subject
