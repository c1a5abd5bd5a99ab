"""`kvfleet drain`: a worker hands over its requests and ends, chosen by name or as the cheapest to lose.

A worker's container runs `kvfleet drain --pid 1` before it stops: that needs no NATS, and no operator's key there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Annotated

import typer
from rich.table import Table

from kvfleet.cli.console import USAGE, err, fail, figures, out
from kvfleet.cli.operator.operator_login import Ca, Cert, Key, Login, SeedFile
from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import CodecError, KvfleetError, NotFound, Unavailable, WorkerLost, from_code
from kvproto.ids import is_token
from kvproto.messages import AdminCommand, AdminReply, AdminRequest, VictimCost, VictimReport, VictimRequest
from kvproto.subjects import Subjects

PLACEMENT_TIMEOUT_S = 5.0  # it goes through its whole index
WORKER_TIMEOUT_S = 3.0
ASK_AGAIN_S = 0.2
DRAIN = AdminRequest(AdminCommand.DRAIN)


def drain(
    worker: Annotated[str | None, typer.Argument(metavar="WORKER", help="its id; see kvfleet's GET /workers")] = None,
    cheapest: Annotated[bool, typer.Option("--cheapest", help="whichever is the cheapest to lose")] = False,
    model: Annotated[str | None, typer.Option(help="only workers of this model; default: of any")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be lost, and drain nobody")] = False,
    wait: Annotated[
        float, typer.Option(min=0, help="seconds to wait for it to be gone; 1 is returned if it is not")
    ] = 0,
    pid: Annotated[
        int | None, typer.Option(min=1, help="the process with this number on this host; NATS is not asked")
    ] = None,
    nats_url: Annotated[str, typer.Option(envvar="KVFLEET_NATS_URL")] = "nats://127.0.0.1:4222",
    nats_user: Annotated[str | None, typer.Option(envvar="KVFLEET_NATS_USER")] = None,
    nats_password: Annotated[str | None, typer.Option(envvar="KVFLEET_NATS_PASSWORD")] = None,
    nats_nkey_seed_file: SeedFile = None,
    nats_ca: Ca = None,
    nats_cert: Cert = None,
    nats_key: Key = None,
    namespace: Annotated[str, typer.Option(envvar="KVFLEET_NAMESPACE")] = "kvf",
) -> None:
    """Drain a worker: it takes nothing new, its requests go on elsewhere, it ends. Its id is stdout's last line."""
    if pid is not None:
        if cheapest or worker is not None:
            fail("--pid says which worker: name no other", USAGE)
        _signal(pid, wait)
        return
    if cheapest == (worker is not None):
        fail("name a worker, or say --cheapest", USAGE)
    if worker is not None and not is_token(worker):
        fail(f"{worker[:80]!r} is no worker's id", USAGE)
    login = Login(nats_url, nats_user, nats_password, nats_nkey_seed_file, nats_ca, nats_cert, nats_key)
    try:
        drained = asyncio.run(_drain(login, Subjects(namespace), worker, model or "", wait, dry_run=dry_run))
    except (KvfleetError, TimeoutError) as error:
        fail(str(error) or type(error).__name__)
    out.print(drained)


def _signal(pid: int, wait_s: float) -> None:
    """Drain a process of this host, and wait for its end if `wait_s` is not 0."""
    until = time.monotonic() + wait_s
    number: int = signal.SIGTERM
    while True:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        except PermissionError:
            fail(f"process {pid} is another user's")
        if not wait_s:
            return
        if time.monotonic() >= until:
            fail(f"process {pid} is still there after {wait_s:g} s")
        number = 0  # asks whether it is there
        time.sleep(ASK_AGAIN_S)


async def _drain(
    login: Login, subjects: Subjects, worker: str | None, model: str, wait_s: float, *, dry_run: bool
) -> str:
    """Returns the worker that drains, or would. Raises KvfleetError."""
    async with login.connected("kvfleet-drain") as connection:
        chosen = await _choose(connection, subjects, worker, model)
        if not dry_run:
            await tell(connection, subjects, chosen)
            err.print(f"{chosen} is draining")
            if wait_s:
                await _gone(connection, subjects, chosen, wait_s)
        return chosen


async def _choose(connection: Connection, subjects: Subjects, worker: str | None, model: str) -> str:
    """Shows what would be lost. A worker that is named can be drained without a placement."""
    try:
        found = await costs(connection, subjects, model)
    except Unavailable as error:
        if worker is None:
            raise
        err.print(f"what is lost with {worker} is not known: {error}")
        return worker
    if worker is None:
        of = f" of {model}" if model else ""
        if not found and model:
            raise NotFound(f"no worker{of} is ready")
        if not found:
            raise NotFound("no model has two ready workers, and the last one of a model is drained by name only")
        if len(found) == 1:
            raise Unavailable(f"{found[0].worker} is the only ready worker{of}: name it to drain it all the same")
    chosen = worker or found[0].worker
    if found:
        err.print(_table(found, chosen))
    return chosen


async def costs(connection: Connection, subjects: Subjects, model: str) -> tuple[VictimCost, ...]:
    """What would be lost with each ready worker, cheapest first. Raises Unavailable."""
    question = codec.encode(VictimRequest(model))
    try:
        reply = await connection.request(subjects.placement_victim(), question, PLACEMENT_TIMEOUT_S)
        return codec.decode(VictimReport, reply.data).workers
    except (TimeoutError, WorkerLost):
        raise Unavailable("no placement answers") from None
    except CodecError as error:
        raise Unavailable(f"placement's answer is unreadable: {error}") from None


async def tell(
    connection: Connection,
    subjects: Subjects,
    worker: str,
    order: AdminRequest = DRAIN,
    limit_s: float = WORKER_TIMEOUT_S,
) -> None:
    """Returns when it has done so. Raises KvfleetError."""
    try:
        reply = await connection.request(subjects.worker_admin(worker), codec.encode(order), limit_s)
        answer = codec.decode(AdminReply, reply.data)
    except WorkerLost:
        raise NotFound(f"no worker {worker} is there") from None
    except TimeoutError:
        raise Unavailable(f"worker {worker} does not answer") from None
    except CodecError as error:
        raise Unavailable(f"worker {worker}'s answer is unreadable: {error}") from None
    if answer.code is not None:
        raise from_code(answer.code, f"worker {worker}: {answer.message}")


async def _gone(connection: Connection, subjects: Subjects, worker: str, wait_s: float) -> None:
    """Wait until NATS has no subscriber for it. Raises Unavailable if that takes too long."""
    question = codec.encode(AdminRequest(AdminCommand.STATS))
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        try:
            await connection.request(subjects.worker_admin(worker), question, WORKER_TIMEOUT_S)
        except WorkerLost:
            return
        except TimeoutError:
            continue
        await asyncio.sleep(ASK_AGAIN_S)
    raise Unavailable(f"{worker} is still there after {wait_s:g} s")


def _table(found: tuple[VictimCost, ...], chosen: str) -> Table:
    """Cheapest first, the chosen one marked."""
    lost = ("s to compute again", "blocks nobody else has", "of them in demand", "requests")
    table = figures(err, "  worker", *lost)
    for one in found:
        is_chosen = one.worker == chosen
        table.add_row(
            f"{'*' if is_chosen else ' '} {one.worker}",
            f"{one.seconds:,.3f}",
            f"{one.unique_blocks:,}",
            f"{one.unique_hot_blocks:,}",
            f"{one.requests:,}",
            style="bold" if is_chosen else None,
        )
    return table
