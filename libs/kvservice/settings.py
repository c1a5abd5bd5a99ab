"""Settings of every process, read once into a frozen object.

Each field is a `KVFLEET_<NAME>` variable and a `--<name>` flag; a flag wins.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import nkeys  # type: ignore[import-untyped]
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from kvproto.errors import InvalidRequest
from kvproto.ids import new_process_id
from kvservice.private_files import read_secret

T = TypeVar("T", bound="ServiceSettings")

SECRETS = ("nats_nkey_seed", "system_nkey_seed", "fleet_key")  # each may be in the file that `<name>_file` names


class ServiceSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="KVFLEET_",
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    nats_url: str = Field("nats://127.0.0.1:4222", description="NATS servers, separated by commas")
    nats_user: str | None = Field(None, description="user of this role (deploy/nats)")
    nats_password: str | None = Field(None, description="its password", repr=False)
    nats_nkey_seed: str | None = Field(None, description="nkey seed, instead of user and password", repr=False)
    nats_nkey_seed_file: Path | None = Field(None, description="file that holds it")
    nats_credentials: str | None = Field(None, description="credentials file, instead of user and password")
    nats_ca: str | None = Field(None, description="CA file: connect by TLS")
    nats_cert: str | None = Field(None, description="client certificate for mutual TLS")
    nats_key: str | None = Field(None, description="key of the client certificate")
    namespace: str = Field("kvf", description="first token of every subject")
    region: str = Field(
        "", pattern=r"^[A-Za-z0-9_-]{0,64}$", description="name of this fleet among fleets that help one another"
    )
    id: str | None = Field(None, description="stable id of this process; drawn if absent")
    host: str = Field("127.0.0.1", description="address to listen on")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="port for /metrics, /livez, /readyz; 0: any")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    otlp_endpoint: str | None = Field(None, description="OpenTelemetry collector, http://HOST:4318: send spans there")
    trace_sample_ratio: float = Field(1.0, ge=0, le=1, description="share of requests without a trace that get one")
    parent_pid: int | None = Field(None, description="end when this process is no longer the parent")

    @property
    def member(self) -> str:
        """This process's id; `load` draws one where none is set."""
        if self.id is None:
            raise ValueError("settings that were not loaded have no id")
        return self.id

    @property
    def nats_servers(self) -> list[str]:
        return [url.strip() for url in self.nats_url.split(",") if url.strip()]


def read_secrets(settings: ServiceSettings) -> dict[str, str]:
    """The secrets that are in files. Raises InvalidRequest naming the setting."""
    found = {}
    for name in SECRETS:
        field = f"{name}_file"
        path: Path | None = getattr(settings, field, None)
        if path is not None:
            if getattr(settings, name):
                raise InvalidRequest(f"--{name.replace('_', '-')} is given too; one of them is enough", field=field)
            found[name] = read_secret(path, field)
        if name.endswith("nkey_seed"):
            check_seed(found.get(name) or getattr(settings, name, None), field if path is not None else name)
    return found


def check_seed(seed: str | None, field: str) -> None:
    """Raises InvalidRequest, which says more than NATS's refusal."""
    if seed is None:
        return
    try:
        user = nkeys.from_seed(bytearray(seed.strip(), "ascii")).public_key.startswith(b"U")
    except (nkeys.NkeysError, ValueError, TypeError):
        user = False
    if not user:
        raise InvalidRequest("no nkey seed of a user (SU...)", field=field)


def die(line: str, code: int = 1) -> NoReturn:
    sys.stderr.write(line.rstrip() + "\n")
    sys.exit(code)


def load(kind: type[T], argv: Sequence[str], program: str) -> T:
    """Exits with a line that names the setting if a value is wrong."""
    try:
        settings = kind(_cli_parse_args=list(argv), _cli_prog_name=program)
        # Drawn here, so that logs, connection and record have the same id.
        drawn = f"{program.split()[-1][0]}-{new_process_id()}"
        update = {"id": settings.id or drawn} | read_secrets(settings)
        return settings.model_copy(update=update)
    except InvalidRequest as error:
        die(f"{program}: --{(error.field or 'settings').replace('_', '-')}: {error.message}", 2)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        die(f"{program}: --{name.replace('_', '-')}: {first['msg']}", 2)
    except SettingsError as error:
        die(f"{program}: {str(error).splitlines()[0]}", 2)
