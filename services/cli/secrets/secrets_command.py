"""`kvfleet secrets`: the secrets of a production fleet, made once, into one folder."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from kvfleet.cli.console import USAGE, err, fail
from kvproto.errors import InvalidRequest, KvfleetError


def secrets(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="the folder; made if it is not there")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="name or address of a NATS server, *.DOMAIN too; default: localhost, 127.0.0.1, nats"),
    ] = None,
    tenant: Annotated[list[str] | None, typer.Option(help="a further tenant with producers of its own")] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="how long certificates are good for")] = 365,
    renew_certificates: Annotated[
        bool, typer.Option("--renew-certificates", help="new certificates from the same CA, for the same keys")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="make everything anew: a different fleet's secrets")] = False,
) -> None:
    """Make the secrets of a fleet that are missing in DIR: certificates, nkeys, fleet key, the first API key.

    What is there is kept. Nothing secret is printed; files are for their owner alone.
    """
    from kvfleet.cli.secrets.secrets_folder import WantedSecrets, fill  # cryptography is needed here alone

    wanted = WantedSecrets(tuple(host or ()), tuple(tenant or ()), days, renew_certificates, force)
    try:
        report = fill(out, wanted, datetime.now(UTC))
    except InvalidRequest as error:
        fail(f"{out}: {error}", USAGE)
    except KvfleetError as error:
        fail(str(error))
    for warning in report.warnings:
        err.print(f"{warning}: --renew-certificates makes it anew")
    for name in report.written:
        err.print(f"wrote {out / name}")
    err.print(f"{out}: {len(report.written)} files written, {len(report.kept)} kept")
