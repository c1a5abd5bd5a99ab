"""Every field of every object is one that Kubernetes 1.30 and 1.34, or the owner of a custom resource, knows."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path

import kubernetes_validate
from jsonschema import Draft202012Validator
from k8s_custom_schemas import CUSTOM
from referencing import Registry, Resource

from tests.deploy.k8s_objects import Object, title

VERSIONS = ("1.30", "1.34")
SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


def schema_problems(objects: Iterable[Object], versions: tuple[str, ...] = VERSIONS) -> list[str]:
    """All of them, each with its path: a first one hides no second one."""
    return [problem for one in objects for problem in _problems(json.dumps(one, sort_keys=True), versions)]


@functools.cache  # components change few objects
def _problems(text: str, versions: tuple[str, ...]) -> tuple[str, ...]:
    one = json.loads(text)
    kind = (one["apiVersion"], one["kind"])
    if kind in CUSTOM:
        validators = [Draft202012Validator(CUSTOM[kind])]
    else:
        validators = [found for version in versions if (found := _validator(version, *kind)) is not None]
        if len(validators) < len(versions):
            return (f"{title(one)}: no schema for {kind[0]} {kind[1]} in every version of {versions}",)
    found = {
        f"{title(one)}: {error.json_path}: {error.message[:200]}"
        for validator in validators
        for error in validator.iter_errors(one)
    }
    return tuple(sorted(found))


@functools.cache
def _validator(version: str, api_version: str, kind: str) -> Draft202012Validator | None:
    folder = SCHEMAS / f"v{version}.0-local-strict"
    group, _, edition = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.split(".")[0], edition)))
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    return Draft202012Validator(json.loads(path.read_text()), registry=_registry(version))


@functools.cache
def _registry(version: str) -> Registry:
    """The definitions that all schemas of a version refer to."""
    path = SCHEMAS / f"v{version}.0-local-strict" / "_definitions.json"
    return Resource.from_contents(json.loads(path.read_text())) @ Registry()
