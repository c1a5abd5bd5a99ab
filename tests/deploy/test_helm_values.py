"""Every value of the chart is documented and known to its schema, and Helm refuses those that cannot be meant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.helm_render import CHART, VALUES, refused

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path


def known(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """The values that a schema names, down to where it takes any name."""
    schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if not (properties := schema.get("properties")):
        yield path
        return
    assert schema["additionalProperties"] is False, path
    for key, inner in properties.items():
        yield from known(inner, f"{path}.{key}" if path else key)


def test_every_value_is_documented() -> None:
    documented = set(re.findall(r"^\| `([^`]+)` \|", (CHART / "README.md").read_text(), re.MULTILINE))
    assert [path for path in leaves(DEFAULTS) if not any(f"{path}.".startswith(f"{one}.") for one in documented)] == []
    named = {path.rpartition(".")[0] for path in leaves(DEFAULTS)} | set(leaves(DEFAULTS))
    assert [one for one in documented if not any(f"{path}.".startswith(f"{one}.") for path in named)] == []


def test_the_schema_names_the_values_and_no_others() -> None:
    named = set(known(SCHEMA)) - {"global"}
    for path in leaves(DEFAULTS):
        assert any(f"{path}.".startswith(f"{one}.") for one in named), path
    for path in named:
        found = DEFAULTS
        for key in path.split("."):
            assert key in found, path
            found = found[key]


def test_a_pool_may_set_what_holds_for_all_pools() -> None:
    assert SCHEMA["properties"]["worker"] in SCHEMA["properties"]["pools"]["additionalProperties"]["anyOf"]


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("worker.gpu.cout=1", "cout"),
        ("wroker.replicas=2", "wroker"),
        ("worker.replicas=many", "replicas"),
        ("worker.settings.KVFLEET_DRAIN_S=60", "KVFLEET_DRAIN_S"),
        ("worker.settings.DRAIN_S=a", "DRAIN_S"),
        ("worker.gpu.resource=nvidia.com/mig-1g", "resource"),
        ("worker.engine=sglang", "engine"),
        ("worker.resources.limits.memory=8GB", "memory"),
        ("pools.ingress.replicas=1", "ingress"),
        ("nats.urls={http://nats}", "urls"),
        ("nats.servers=mine", "servers"),
    ],
)
def test_the_schema_refuses(flag: str, named: str) -> None:
    said = refused(f"--set={flag}")
    assert "values don't meet the specifications of the schema" in said
    assert named in said.partition("schema")[2]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("autoscaling.enabled=true,pools.more.replicas=1", "pools.more and pools.worker serve demo"),
        ("worker.tensorParallelSize=2", "pools.worker: a model over 2 cards wants gpu.count=2"),
        (
            "worker.tensorParallelSize=2,worker.gpu.count=2,worker.gpu.resource=nvidia.com/mig-1g.10gb",
            "a model goes over several whole cards, not over several nvidia.com/mig-1g.10gb",
        ),
        ("worker.engine=vllm", "pools.worker: vLLM wants gpu.count of 1 or more"),
    ],
)
def test_what_no_schema_can_say_is_refused_too(flags: str, says: str) -> None:
    assert says in refused(f"--set={flags}")


def test_a_file_of_values_says_what_it_is_for() -> None:
    for path in VALUES.values():
        assert path.read_text().startswith("# ")
