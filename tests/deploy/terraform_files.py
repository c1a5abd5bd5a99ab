"""Reads a Terraform folder and says what is wrong in it, as far as that can be said without the provider.

Each check returns a list of sentences, empty if all is well: tests also run them on folders with planted mistakes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hcl2

SCHEMA = Path(__file__).with_name("google_provider_schema.json")
META = {"count", "for_each", "depends_on", "lifecycle", "provider"}


@dataclass(frozen=True, slots=True)
class Module:
    """One folder: `resources` and `data` as {type: {name: body}}, everything else by name."""

    resources: dict[str, dict[str, Any]]
    data: dict[str, dict[str, Any]]
    variables: dict[str, Any]
    outputs: dict[str, Any]
    local_values: dict[str, Any]
    terraform: dict[str, Any]
    text: str  # all files, without comments


def _plain(value: Any) -> Any:
    """The parser keeps the quotes of names and strings."""
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items() if k not in ("__comments__", "__inline_comments__")}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        return value[1:-1]
    return value


@functools.cache  # half a second for ten files; a planted mistake changes one of them
def _parse(text: str) -> dict[str, Any]:
    return _plain(hcl2.loads(text))


def read(folder: Path) -> Module:
    found: dict[str, dict[str, Any]] = {
        k: {} for k in ("resource", "data", "variable", "output", "locals", "terraform")
    }
    texts = []
    for path in sorted(folder.glob("*.tf")):
        text = path.read_text()
        texts.append(re.sub(r"(?m)(^|\s)(#|//).*$", "", text))
        for kind, blocks in _parse(text).items():
            for block in blocks if isinstance(blocks, list) else []:
                body = {k: v for k, v in block.items() if k != "__is_block__"}
                if kind in ("resource", "data"):
                    for type_, named in body.items():
                        found[kind].setdefault(type_, {}).update(named)
                elif kind in found:
                    found[kind].update(body)
    return Module(
        resources=found["resource"],
        data=found["data"],
        variables=found["variable"],
        outputs=found["output"],
        local_values=found["locals"],
        terraform=found["terraform"],
        text="\n".join(texts),
    )


def bodies(module: Module) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for kind, group in (("resource", module.resources), ("data", module.data)):
        for type_, named in group.items():
            for name, body in named.items():
                yield kind, type_, name, body


def wrong_names(module: Module) -> list[str]:
    """Uses of what is not declared, and declarations that nothing uses."""
    wrong = []
    for kind, prefix, declared in (("variable", "var", module.variables), ("local", "local", module.local_values)):
        used = set(re.findall(rf"\b{prefix}\.(\w+)", module.text))
        wrong += [f"{prefix}.{name} is not declared" for name in sorted(used - set(declared))]
        if kind == "variable":  # its own validation is no use
            used = set(re.findall(r"\bvar\.(\w+)", re.sub(r'(?ms)^variable ".*?^}', "", module.text)))
        wrong += [f"{kind} {name} is never used" for name in sorted(set(declared) - used)]
    return wrong


def undescribed(module: Module) -> list[str]:
    wrong = [
        f"variable {n} has no {k}" for n, v in module.variables.items() for k in ("type", "description") if k not in v
    ]
    return wrong + [f"output {n} has no description" for n, v in module.outputs.items() if "description" not in v]


def against_schema(module: Module) -> list[str]:
    """Arguments, blocks and references that the provider's schema does not know, and required ones that lack."""
    schema = json.loads(SCHEMA.read_text())
    wrong = []
    pinned = module.terraform.get("required_providers", [{}])[0].get("google", {}).get("version")
    if pinned != schema["version"]:
        wrong.append(f"the provider is pinned to {pinned}, the schema is that of {schema['version']}")
    known = schema["resources"]
    for kind, type_, name, body in bodies(module):
        entry = known.get(f"{kind}.{type_}")
        where = f"{type_}.{name}"
        if entry is None:
            wrong.append(f"{where}: no schema of this {kind}: run tests/deploy/google_schema.py again")
            continue
        wrong += _against(entry["arguments"], {k: v for k, v in body.items() if k not in META}, where)
    references = re.findall(r"(\bdata\.)?\b(google_\w+)\.(\w+)(?:\[[^]]*\])?(?:\.(\w+))?", module.text)
    for data, type_, name, attribute in references:
        kind = "data" if data else "resource"
        group = module.data if data else module.resources
        if name not in group.get(type_, {}):
            wrong.append(f"{type_}.{name} is used and does not exist")
        elif attribute and (entry := known.get(f"{kind}.{type_}")) is not None:
            arguments = {a.lstrip("!") for a in entry["arguments"]}
            if attribute not in arguments | set(entry["computed"]):
                wrong.append(f"{type_}.{name} has no attribute {attribute}")
    return wrong


def _against(arguments: dict[str, Any], body: dict[str, Any], where: str) -> list[str]:
    kinds = {key.lstrip("!"): value for key, value in arguments.items()}
    given = {k: v for k, v in body.items() if k not in ("__is_block__", "dynamic")}
    for dynamic in body.get("dynamic", []):
        for name, inner in dynamic.items():
            if name != "__is_block__":
                given[name] = inner["content"]
    wrong = [f"{where} lacks {k[1:]}" for k in arguments if k.startswith("!") and k[1:] not in given]
    for name, value in given.items():
        if name not in kinds:
            wrong.append(f"{where} knows no {name}")
            continue
        is_block = isinstance(value, list) and any(isinstance(v, dict) and "__is_block__" in v for v in value)
        kind = kinds[name]
        if is_block != (isinstance(kind, dict) or kind == "block"):
            forms = ("an argument", "a block") if is_block else ("a block", "an argument")
            wrong.append(f"{where}.{name} is {forms[0]}, not {forms[1]}")
        elif is_block and isinstance(kind, dict):
            for inner in value:
                wrong += _against(kind, inner, f"{where}.{name}")
        elif kind == "bool" and isinstance(value, str) and not value.startswith("${"):
            wrong.append(f"{where}.{name} is true or false, not {value!r}")
        elif kind == "number" and isinstance(value, str) and not value.startswith("${"):
            wrong.append(f"{where}.{name} is a number, not {value!r}")
        elif kind.startswith("list of") and not isinstance(value, list) and not str(value).startswith("${"):
            wrong.append(f"{where}.{name} is a list, not {value!r}")
    return wrong


def at(body: dict[str, Any], path: str) -> Any:
    """The value at `block.block.argument`; None if there is none."""
    value: Any = body
    for part in path.split("."):
        if isinstance(value, list):
            value = value[0] if value else None
        value = value.get(part) if isinstance(value, dict) else None
    return value
