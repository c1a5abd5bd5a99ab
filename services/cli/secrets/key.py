"""`kvfleet key new`: a new API key on stderr, shown once and stored nowhere, and its entry for api-keys.toml on stdout.

kvfleet key new --tenant search --max-concurrent 64 >> api-keys.toml
"""

from __future__ import annotations

import hashlib
import re
import secrets
from datetime import UTC, datetime
from typing import Annotated

import typer

from kvfleet.cli.console import USAGE, fail
from kvproto.ids import DEFAULT_TENANT, is_token

PREFIX = "kvf_"  # so that scanners of repositories and logs know one when they see it
RANDOM_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.@/-]{0,63}\Z")

app = typer.Typer(name="key", help="API keys of the HTTP endpoint.", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """API keys of the HTTP endpoint."""


@app.command("new")
def new(
    tenant: Annotated[str, typer.Option(help="whose caches, sessions and limits it uses")] = DEFAULT_TENANT,
    name: Annotated[
        str | None, typer.Option(help="what logs call it; default: the tenant and four random digits")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="may read metrics, workers, placements, and K and V")] = False,
    not_after: Annotated[
        datetime | None, typer.Option(help="when it expires, in UTC", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ"])
    ] = None,
    max_concurrent: Annotated[int, typer.Option(min=0, help="requests at once; 0: no limit, as with the others")] = 0,
    requests_per_minute: Annotated[int, typer.Option(min=0)] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="prompt and generated ones")] = 0,
    tokens_per_day: Annotated[int, typer.Option(min=0)] = 0,
    max_tokens: Annotated[int, typer.Option(min=0, help="that a request may generate")] = 0,
    max_priority: Annotated[int, typer.Option(min=-100, max=100)] = 0,
) -> None:
    """Draw a key: its entry for --api-keys-file on stdout, the key itself, once, on stderr."""
    if not is_token(tenant):
        fail("--tenant: must be 1 to 64 of A-Z a-z 0-9 _ -", USAGE)
    called = name if name is not None else f"{tenant[:59]}-{secrets.token_hex(2)}"
    if not _NAME.match(called):
        fail("--name: must be 1 to 64 of A-Z a-z 0-9 _ . @ / - and space", USAGE)
    key = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    limits = {
        "max_concurrent": max_concurrent,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "tokens_per_day": tokens_per_day,
        "max_tokens": max_tokens,
        "max_priority": max_priority,
    }
    typer.echo(toml_entry(key, called, tenant, admin, not_after, limits))
    typer.echo(f"key (shown once): {key}", err=True)


def toml_entry(
    key: str, name: str, tenant: str, admin: bool, not_after: datetime | None, limits: dict[str, int]
) -> str:
    """The entry holds the key's SHA-256 and the limits that are not 0."""
    lines = ["[[keys]]", f'name = "{name}"', f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    lines.append(f'tenant = "{tenant}"')
    if admin:
        lines.append("admin = true")
    if not_after is not None:
        lines.append(f"not_after = {not_after.replace(tzinfo=UTC).strftime('%Y-%m-%dT%H:%M:%SZ')}")
    lines += [f"{limit} = {value}" for limit, value in limits.items() if value]
    return "\n".join(lines) + "\n"
