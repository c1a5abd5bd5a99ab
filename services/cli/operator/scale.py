"""`kvfleet scale w N`: so many workers of a model in the fleet that `kvfleet up` runs on one machine."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from typing import Annotated

import typer

from kvfleet.cli.console import err, fail, out
from kvfleet.cli.operator.operator_login import Ca, Cert, Key, Login, SeedFile
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.errors import CodecError, KvfleetError, NotFound, Unavailable, WorkerLost, from_code
from kvproto.messages import Role, ScaleReply, ScaleRequest, State, WorkerRecord
from kvproto.subjects import Subjects

ANSWER_S = 5.0
LOOK_S = 0.2


class ScaledGroup(StrEnum):
    """Named as their ids begin."""

    W = "w"


def scale(
    group: Annotated[ScaledGroup, typer.Argument(help="w: workers", show_choices=True)],
    workers: Annotated[int, typer.Argument(metavar="N", min=1, help="how many there are to be")],
    model: Annotated[str, typer.Option(help="of this model; default: of the only one")] = "",
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait until so many are ready; else 1 is returned")] = 0,
    nats_url: Annotated[str, typer.Option(envvar="KVFLEET_NATS_URL")] = "nats://127.0.0.1:4222",
    nats_user: Annotated[str | None, typer.Option(envvar="KVFLEET_NATS_USER")] = None,
    nats_password: Annotated[str | None, typer.Option(envvar="KVFLEET_NATS_PASSWORD")] = None,
    nats_nkey_seed_file: SeedFile = None,
    nats_ca: Ca = None,
    nats_cert: Cert = None,
    nats_key: Key = None,
    namespace: Annotated[str, typer.Option(envvar="KVFLEET_NAMESPACE")] = "kvf",
) -> None:
    """Start workers of `kvfleet up`, or have the cheapest to lose drain, until there are so many."""
    login = Login(nats_url, nats_user, nats_password, nats_nkey_seed_file, nats_ca, nats_cert, nats_key)
    try:
        asyncio.run(_scale(login, Subjects(namespace), ScaleRequest(workers, model), wait))
    except (KvfleetError, TimeoutError) as error:
        fail(str(error) or type(error).__name__)


async def _scale(login: Login, subjects: Subjects, asked: ScaleRequest, wait_s: float) -> None:
    async with login.connected("kvfleet-scale") as connection:
        reply = await _ask(connection, subjects, asked)
        out.print(f"{reply.model}: {reply.workers} workers, {asked.workers} asked for")
        if wait_s:
            await _settled(connection, subjects, reply.model, asked.workers, wait_s)
            err.print(f"{reply.model}: {asked.workers} workers are ready")


async def _ask(connection: Connection, subjects: Subjects, asked: ScaleRequest) -> ScaleReply:
    """Raises KvfleetError."""
    try:
        reply = await connection.request(subjects.embedded_scale(), codec.encode(asked), ANSWER_S)
        answer = codec.decode(ScaleReply, reply.data)
    except WorkerLost:
        raise Unavailable("no `kvfleet up` is there to be scaled") from None
    except TimeoutError:
        of = f"with a model {asked.model} " if asked.model else ""
        raise NotFound(f"no `kvfleet up` {of}answers") from None
    except CodecError as error:
        raise Unavailable(f"the answer is unreadable: {error}") from None
    if answer.code is not None:
        raise from_code(answer.code, answer.message)
    return answer


async def _settled(connection: Connection, subjects: Subjects, model: str, wanted: int, wait_s: float) -> None:
    """Wait until the fleet has so many workers of the model, all ready. Raises Unavailable if that takes too long."""
    until = time.monotonic() + wait_s
    bucket = await Bucket.open(connection, subjects.members_bucket)
    while True:
        entries = await bucket.listed(f"{Role.WORKER.value}.>")
        records = [codec.decode(WorkerRecord, entry.value) for entry in entries if entry.value is not None]
        states = [record.state for record in records if record.model == model]
        if states == [State.READY] * wanted:
            return
        if time.monotonic() >= until:
            raise Unavailable(f"{states.count(State.READY)} of {wanted} workers are ready after {wait_s:g} s")
        await asyncio.sleep(LOOK_S)
