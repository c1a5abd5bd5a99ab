"""docs/reference/client.md: the Python client, from the source of `kvproto`."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from scripts.reference.markdown import code, head, table, written
from scripts.reference.source import ModuleSource, docstring, is_property, signature

CLIENT = ModuleSource("libs/kvproto/client.py")
STREAM = ModuleSource("libs/kvproto/streams/stream.py")
GENERATION = ModuleSource("libs/kvproto/streams/generation.py")
CONNECTION = ModuleSource("libs/kvproto/connection.py")
CHATS = ModuleSource("libs/kvproto/chats.py")
IDS = ModuleSource("libs/kvproto/ids.py")
OF_A_CLIENT = ("open", "close", "generate", "explain", "newest_decisions", "admin", "bundle")
OF_A_STREAM = ("read", "cancel", "closed", "error", "ids", "ids_of")


def page() -> str:
    lines = head("Python client", "the source of `kvproto`")
    lines += [
        "`pip install kvfleet` brings it, with nats-py and msgpack alone. [Producers](../producers.md) has examples;"
    ]
    lines += ["`Sampling` and the events are [messages of the wire](wire.md#requests).", ""]
    lines += _class(CLIENT, "Client", OF_A_CLIENT)
    lines += ["Options of `open` are those of the connection's, but `name` and `inbox_prefix`:", ""]
    lines += _class(CONNECTION, "Connection", ("open",))
    lines += _class(STREAM, "Stream", OF_A_STREAM)
    for kind in map(GENERATION.class_named, ("Generation", "ClientCounters")):
        lines += [f"## {kind.name}", "", docstring(kind), ""]
        lines += table(
            ("field", "type", "default", ""),
            ((code(one.name), code(one.type), code(one.default), one.comment) for one in GENERATION.fields(kind)),
        )
    (chat_of,) = (one for one in CHATS.tree.body if isinstance(one, ast.FunctionDef) and one.name == "chat_of")
    lines += ["## chat_of", "", "```", signature(chat_of), "```", "", docstring(chat_of), ""]
    text = written(lines)
    for one in IDS.fields(IDS.tree):
        if one.name.startswith("DEFAULT_"):
            text = text.replace(one.name, one.default)
    return text


def _class(source: ModuleSource, name: str, members: Collection[str]) -> Iterator[str]:
    kind = source.class_named(name)
    yield from (f"## {name}", "", docstring(kind), "")
    found = [
        one for one in kind.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name in members
    ]
    if len(found) != len(members):
        raise LookupError(f"{name} has only {[one.name for one in found]}")
    for one in found:
        awaited = "await " if isinstance(one, ast.AsyncFunctionDef) else ""
        shown = one.name if is_property(one) else f"{awaited}{signature(one)}"
        yield from (f"### {name}.{one.name}", "", "```", shown, "```", "", docstring(one), "")
