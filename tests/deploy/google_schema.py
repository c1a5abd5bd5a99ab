"""Makes google_provider_schema.json: which arguments and blocks each resource of the Google provider takes.

Terraform's own `validate` needs the provider, and so its registry. The provider's schema is also in the package
`cdktf-cdktf-provider-google` (16.12.1 was generated from provider 6.50.0), as typed Python; this reads it without
importing it:

    pip download --no-deps cdktf-cdktf-provider-google==16.12.1
    python tests/deploy/google_schema.py cdktf_cdktf_provider_google-*.whl deploy/terraform/gke

Written are the resources and data sources that the folder uses, and of their top-level blocks those that it uses. A
key that starts with "!" is required; a value is a type, or an object for a block; `computed` are attributes that can
only be read.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

META = {"connection", "count", "depends_on", "for_each", "lifecycle", "provider", "provisioners"}
FRAME = {"friendly_unique_id", "fqn", "dependencies", "raw_overrides", "cdktf_stack", "node", "id_input"}
SIMPLE = {"builtins.str": "string", "jsii.Number": "number", "builtins.bool": "bool"}
PROVIDER = re.compile(r"bindings for hashicorp/google provider version ([\d.]+)")


def _arguments(classes: dict[str, ast.ClassDef], name: str, top: bool = False) -> dict[str, Any]:
    init = next(n for n in classes[name].body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    found: dict[str, Any] = {}
    for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True):
        if top and argument.arg in META:
            continue
        found[("!" if default is None else "") + argument.arg] = _type(classes, argument.annotation)
    return found


def _type(classes: dict[str, ast.ClassDef], annotation: ast.expr | None) -> Any:
    """A block if the annotation names a class of this module, else the type it reads as."""
    assert annotation is not None
    text = ast.unparse(annotation)
    for node in ast.walk(annotation):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "value", None)  # a class, or one defined below
        if isinstance(name, str) and name in classes:
            return _arguments(classes, name)
    kind = next((simple for long, simple in SIMPLE.items() if long in text), "any")
    if "Mapping" in text:
        return f"map of {kind}"
    return f"list of {kind}" if "Sequence" in text else kind


def _resource(source: str, module: str) -> dict[str, Any]:
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    main = next(name for name in classes if name.lower() == module.replace("_", ""))
    arguments = _arguments(classes, main + "Config", top=True)
    known = {key.lstrip("!") for key in arguments}
    properties = [
        node.name
        for node in classes[main].body
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d).endswith("property") for d in node.decorator_list)
    ]
    computed = sorted(p for p in properties if p not in known | META | FRAME and not p.endswith("_input"))
    return {"arguments": arguments, "computed": computed}


def main(wheel: str, folder: str) -> None:
    text = "\n".join(path.read_text() for path in sorted(Path(folder).glob("*.tf")))
    used = set(re.findall(r'^(resource|data)\s+"(google_\w+)"', text, re.MULTILINE))
    words = set(re.findall(r"\w+", text))
    resources = {}
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith("METADATA"))
        version = PROVIDER.search(archive.read(metadata).decode())
        assert version, "the package no longer says which provider it was made from"
        for kind, name in sorted(used):
            module = ("data_" + name) if kind == "data" else name.removeprefix("google_")
            entry = _resource(archive.read(f"cdktf_cdktf_provider_google/{module}/__init__.py").decode(), module)
            arguments = entry["arguments"]
            for key, value in arguments.items():
                if isinstance(value, dict) and key.lstrip("!") not in words:
                    arguments[key] = "block"
            resources[f"{kind}.{name}"] = entry
    whole = {"provider": "hashicorp/google", "version": version[1], "resources": resources}
    target = Path(__file__).with_name("google_provider_schema.json")
    target.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
