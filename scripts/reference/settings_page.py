"""docs/reference/settings.md: the settings of each process, from the classes that read them."""

from __future__ import annotations

from typing import Any

from kvfleet.ingress.settings import IngressSettings
from kvfleet.placement.settings import PlacementSettings
from kvfleet.vault.settings import VaultSettings
from kvfleet.worker.settings import WorkerSettings
from kvservice.data_plane import DataPlaneSettings
from kvservice.settings import ServiceSettings
from scripts.reference.json_schema import words
from scripts.reference.markdown import code, head, table, written

KINDS: tuple[tuple[str, type[ServiceSettings], type[ServiceSettings] | None], ...] = (
    ("Every process", ServiceSettings, None),
    ("Data plane", DataPlaneSettings, ServiceSettings),
    ("Ingress", IngressSettings, ServiceSettings),
    ("Placement", PlacementSettings, ServiceSettings),
    ("Worker", WorkerSettings, DataPlaneSettings),
    ("Vault", VaultSettings, DataPlaneSettings),
)
PREFIX = "KVFLEET_"


def page() -> str:
    lines = head("Settings", "the classes that read them")
    lines += [
        "Each setting is a flag of its `kvfleet` command and an environment variable; the flag wins.",
        "A wrong value ends the process with one line that names the setting.",
        "",
    ]
    for title, kind, parent in KINDS:
        lines += [f"## {title}", ""]
        if kind is DataPlaneSettings:
            lines += ["Of workers and vaults, which serve blocks.", ""]
        properties = kind.model_json_schema()["properties"]
        inherited = parent.model_fields if parent is not None else {}
        lines += table(
            ("flag", "variable", "value", "default", ""),
            (_row(name, properties[name]) for name in kind.model_fields if name not in inherited),
        )
    return written(lines)


def _row(name: str, schema: dict[str, Any]) -> tuple[str, ...]:
    default = schema.get("default")
    shown = "" if default in (None, "") else code(_text(default))
    flag, variable = f"--{name.replace('_', '-')}", f"{PREFIX}{name.upper()}"
    return code(flag), code(variable), words(schema), shown, schema.get("description", "")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
