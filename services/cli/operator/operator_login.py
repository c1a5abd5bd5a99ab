"""The operator's login at NATS: the settings that a process has, as flags or KVFLEET_*."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext
from typing import Annotated

import typer

from kvproto.connection import Connection
from kvproto.ids import new_process_id
from kvproto.subjects import ADMIN_INBOX, inbox_prefix
from kvservice.private_files import read_secret

SeedFile = Annotated[
    Path | None,
    typer.Option(envvar="KVFLEET_NATS_NKEY_SEED_FILE", help="file with the admin's nkey seed, instead of a password"),
]
Ca = Annotated[Path | None, typer.Option(envvar="KVFLEET_NATS_CA", help="CA file: connect by TLS")]
Cert = Annotated[Path | None, typer.Option(envvar="KVFLEET_NATS_CERT", help="client certificate for mutual TLS")]
Key = Annotated[Path | None, typer.Option(envvar="KVFLEET_NATS_KEY", help="key of the client certificate")]


@dataclass(frozen=True, slots=True)
class Login:
    """`url`: one server or several, separated by commas."""

    url: str
    user: str | None = None
    password: str | None = None
    seed_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @asynccontextmanager
    async def connected(self, name: str) -> AsyncIterator[Connection]:
        """Raises KvfleetError."""
        seed = read_secret(self.seed_file, "nats_nkey_seed_file") if self.seed_file is not None else None
        connection = await Connection.open(
            [part.strip() for part in self.url.split(",")],
            name=name,
            inbox_prefix=inbox_prefix(ADMIN_INBOX, new_process_id()),
            user=self.user if seed is None else None,
            password=self.password,
            nkey_seed=seed,
            tls=self._tls(seed),
        )
        try:
            yield connection
        finally:
            await connection.close()

    def variables(self) -> dict[str, str]:
        if self.user is None:
            return {}
        return {"KVFLEET_NATS_USER": self.user, "KVFLEET_NATS_PASSWORD": self.password or ""}

    def _tls(self, seed: str | None) -> SSLContext | None:
        """Checks the seed too. Raises KvfleetError."""
        ca, cert, key = (None if path is None else str(path) for path in (self.ca, self.cert, self.key))
        if not (seed or ca or cert or key):
            return None  # without pydantic, which takes as long to import as all else here
        from kvservice.membership import tls_context
        from kvservice.settings import ServiceSettings, check_seed

        check_seed(seed, "nats_nkey_seed_file")
        return tls_context(ServiceSettings.model_construct(nats_ca=ca, nats_cert=cert, nats_key=key))
