"""`kvfleet init`: create the fleet's buckets and its first data-plane key, as a deployment's init job does."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from kvfleet.cli.console import err, fail
from kvfleet.cli.operator.operator_login import Ca, Cert, Key, Login, SeedFile
from kvproto.buckets import BATCHES_BYTES, RESPONSES_BYTES, RESPONSES_TTL_S, Bucket, ensure_buckets
from kvproto.dataplane.keys import ensure_key, rotate_key
from kvproto.errors import KvfleetError
from kvproto.subjects import Subjects
from kvproto.work_queue import ensure_work_queue

PATIENCE_S = 10.0  # a cluster that starts at the same moment has no leader yet


async def create_buckets(
    login: Login, namespace: str, *, replicas: int = 1, rotate: bool = False, **responses: Any
) -> list[str]:
    """Create what is missing, and a further data-plane key to `rotate`; `responses`: as `ensure_buckets` has them.
    Returns a line for each bucket whose configuration differs. Raises KvfleetError."""
    async with login.connected("kvfleet-init") as connection:
        subjects = Subjects(namespace)
        differences = await ensure_buckets(connection, subjects, replicas=replicas, patience_s=PATIENCE_S, **responses)
        differences += await ensure_work_queue(connection, subjects, replicas=replicas)
        keys = await Bucket.open(connection, subjects.keys_bucket)
        await ensure_key(keys)
        if rotate:
            await rotate_key(keys)
        return differences


def init(
    nats_url: Annotated[str, typer.Option(envvar="KVFLEET_NATS_URL")] = "nats://127.0.0.1:4222",
    nats_user: Annotated[str | None, typer.Option(envvar="KVFLEET_NATS_USER")] = None,
    nats_password: Annotated[str | None, typer.Option(envvar="KVFLEET_NATS_PASSWORD")] = None,
    nats_nkey_seed_file: SeedFile = None,
    nats_ca: Ca = None,
    nats_cert: Cert = None,
    nats_key: Key = None,
    namespace: Annotated[str, typer.Option(envvar="KVFLEET_NAMESPACE")] = "kvf",
    replicas: Annotated[int, typer.Option(help="1, or 3 on a cluster")] = 1,
    responses_bytes: Annotated[
        int, typer.Option(min=1_000_000, help="size of all stored responses; the oldest give way")
    ] = RESPONSES_BYTES,
    responses_ttl_s: Annotated[float, typer.Option(min=1, help="how long they are kept")] = RESPONSES_TTL_S,
    batches_bytes: Annotated[
        int, typer.Option(min=1_000_000, help="size of all files and results of batches; a full one takes no more")
    ] = BATCHES_BYTES,
    rotate_data_plane_key: Annotated[
        bool, typer.Option("--rotate-data-plane-key", help="a new key; the one before it stays accepted")
    ] = False,
) -> None:
    """Create the buckets, the queue and a data-plane key; says in one line what differs from what is there already."""
    login = Login(nats_url, nats_user, nats_password, nats_nkey_seed_file, nats_ca, nats_cert, nats_key)
    try:
        stored = {
            "responses_bytes": responses_bytes,
            "responses_ttl_s": responses_ttl_s,
            "batches_bytes": batches_bytes,
        }
        differences = asyncio.run(
            create_buckets(login, namespace, replicas=replicas, rotate=rotate_data_plane_key, **stored)
        )
    except KvfleetError as error:
        fail(str(error))
    for line in differences:
        err.print(line)
    err.print(f"buckets of namespace {namespace} are ready")
