"""Names: those of the semantic conventions are real, ours are explained, and nothing of a text has a name at all."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[3]
RECORDERS = [
    "libs/kvservice/tracing.py", "libs/kvservice/tracing_otel.py", "libs/kvservice/data_plane.py",
    "services/ingress/telemetry/request_trace.py", "services/placement/record/decision_trace.py",
    "services/worker/streams/request_trace.py", "services/worker/tiers/looking.py",
    "services/worker/tiers/fetching.py",
]  # fmt: skip
NAME = re.compile(r'f?"((?:gen_ai|messaging|http|url|error|kvfleet|service)\.[a-z_.{}]+)"')


def names() -> set[str]:
    found = {name for path in RECORDERS for name in NAME.findall((ROOT / path).read_text())}
    assert len(found) > 30
    return found


def conventions() -> set[str]:
    """All attribute names that the installed package knows."""
    package = "opentelemetry.semconv"
    found: set[str] = set()
    for prefix in (f"{package}.attributes", f"{package}._incubating.attributes"):
        for group in ("gen_ai", "messaging", "http", "url", "error", "service"):
            try:
                module = import_module(f"{prefix}.{group}_attributes")
            except ModuleNotFoundError:
                continue
            found |= {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}
    return found


def test_standard_names_are_standard() -> None:
    assert {name for name in names() if not name.startswith("kvfleet.")} <= conventions()


def test_all_names_are_explained() -> None:
    page = (ROOT / "docs/tracing.md").read_text()
    unexplained = {name for name in names() if f"`{name.replace('{tier}', 'TIER')}`" not in page}
    assert unexplained - {"service.name", "service.instance.id"} == set()


def test_texts_have_no_name() -> None:
    forbidden = ("prompt", "completion", "messages", "text", "key", "authorization", "stop")
    assert not {name for name in names() if name.split(".")[-1] in forbidden}
