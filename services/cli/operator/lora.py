"""`kvfleet lora`: load an adapter into the fleet's vLLM workers while they run, or unload it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from kvfleet.cli.console import USAGE, err, fail, out
from kvfleet.cli.operator.drain import tell
from kvfleet.cli.operator.operator_login import Ca, Cert, Key, Login, SeedFile
from kvproto.connection import Connection
from kvproto.errors import KvfleetError, NotFound
from kvproto.ids import is_token
from kvproto.members import Members
from kvproto.messages import AdminCommand, AdminRequest, Role
from kvproto.subjects import Subjects

LIMIT_S = 150.0  # vLLM reads weights, and may fetch them first


def lora(
    name: Annotated[str, typer.Argument(help="that clients give as `model`")],
    folder: Annotated[str | None, typer.Argument(help="its absolute path where vLLM runs, or a hub id")] = None,
    unload: Annotated[bool, typer.Option("--unload", help="unload it; what runs with it goes on")] = False,
    worker: Annotated[
        list[str] | None, typer.Option(help="only at this one; may be repeated. Default: all vLLM workers")
    ] = None,
    model: Annotated[str | None, typer.Option(help="only at workers of this model")] = None,
    nats_url: Annotated[str, typer.Option(envvar="KVFLEET_NATS_URL")] = "nats://127.0.0.1:4222",
    nats_user: Annotated[str | None, typer.Option(envvar="KVFLEET_NATS_USER")] = None,
    nats_password: Annotated[str | None, typer.Option(envvar="KVFLEET_NATS_PASSWORD")] = None,
    nats_nkey_seed_file: SeedFile = None,
    nats_ca: Ca = None,
    nats_cert: Cert = None,
    nats_key: Key = None,
    namespace: Annotated[str, typer.Option(envvar="KVFLEET_NAMESPACE")] = "kvf",
) -> None:
    """Load a LoRA adapter into vLLM workers, or unload it. The workers that have done so are stdout's lines."""
    if unload == (folder is not None):
        fail("name a folder, or say --unload", USAGE)
    if (wrong := next((one for one in worker or () if not is_token(one)), None)) is not None:
        fail(f"{wrong[:80]!r} is no worker's id", USAGE)
    command = AdminCommand.UNLOAD_ADAPTER if unload else AdminCommand.LOAD_ADAPTER
    order = AdminRequest(command, model=name, path=folder or "")
    login = Login(nats_url, nats_user, nats_password, nats_nkey_seed_file, nats_ca, nats_cert, nats_key)
    try:
        refused = asyncio.run(_order(login, Subjects(namespace), order, worker or [], model))
    except (KvfleetError, TimeoutError) as error:
        fail(str(error) or type(error).__name__)
    if refused:
        raise typer.Exit(1)


async def _order(
    login: Login, subjects: Subjects, order: AdminRequest, workers: list[str], model: str | None
) -> list[str]:
    """Those that have not done so. Raises KvfleetError."""
    async with login.connected("kvfleet-lora") as connection:
        chosen = workers or await _vllm_workers(connection, subjects, model)

        async def at(worker: str) -> str | None:
            try:
                await tell(connection, subjects, worker, order, LIMIT_S)
            except KvfleetError as error:
                err.print(str(error))
                return worker
            out.print(worker)
            return None

        return [one for one in await asyncio.gather(*map(at, chosen)) if one is not None]


async def _vllm_workers(connection: Connection, subjects: Subjects, model: str | None) -> list[str]:
    """Raises NotFound."""
    members = Members(connection, subjects, hears=False, role=Role.WORKER)
    await members.start()
    found = [view.record for view in members.view.workers.values() if view.record.engine == "vllm"]
    await members.stop()
    chosen = sorted(one.id for one in found if model in (None, one.model))
    if not chosen:
        raise NotFound(f"no vLLM worker{f' of {model}' if model else ''} is there")
    return chosen
