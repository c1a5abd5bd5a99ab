"""What must hold when nothing breaks any more and nothing runs: all books balance, all views agree, nothing is held,
and what was deleted is nowhere. Returns what does not."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

from kvfleet.ingress.ingress import Ingress
from kvfleet.placement.index.kv_indexer import Follows
from kvfleet.placement.loop import PlacementLoop
from kvproto.client import Client
from tests.dst.world import Process, Vault, World
from tests.support.fake_fleet import FakeWorker


def faults_at_rest(world: World) -> list[str]:
    """Empty if all is well."""
    found: list[str] = []
    workers = {name for name, process in world.processes.items() if isinstance(process.made, FakeWorker)}
    vaults = {name for name, process in world.processes.items() if isinstance(process.made, Vault)}
    found += [f"{one.place.name}: an earlier life goes on" for one in world.former if not one.place.is_dead]
    for name, process in world.processes.items():
        if name != "init" and (process.made is None or process.place.is_dead):
            found.append(f"{name} is not there: {process.failed!r}")
            continue
        home = world.home_of(name)
        near = [{other for other in some if world.home_of(other) is home} for some in (workers, vaults)]
        found += [f"{name}: {told}" for told in _of(process, *near)]
    if not found:
        found += [f"views: {told}" for told in _followed(world)]
    return found


def _of(process: Process, workers: set[str], vaults: set[str]) -> Iterator[str]:
    made = process.made
    if isinstance(made, FakeWorker):
        engine, load = made.thread.engine, made.thread.engine.load()
        yield from _balanced("engine", engine.check_integrity)
        held = {"waiting": load.waiting, "running": load.running, "blocks held": load.blocks_used}
        yield from (f"{count} {what}" for what, count in held.items() if count)
        known = {record.id for record, _ in made.network._vaults.view.members.values()} if made.network else vaults
        if known != vaults:
            yield f"knows the vaults {sorted(known)}"
    elif isinstance(made, Vault):
        yield from _balanced("store", made.store.check_integrity)
        if made.loop.states is not None:
            yield from _balanced("states", made.loop.states.check_integrity)
        if made.thread is not None:
            yield from _balanced("disk", made.thread.disk.check_integrity)
    elif isinstance(made, PlacementLoop):
        core = made.core
        yield from _balanced("core", core.check_integrity)
        if len(core.in_flight) or len(core.bookings):
            yield f"{len(core.in_flight)} in flight, {len(core.bookings)} booked"
        yield from _sees(made.subscriptions.members.view, workers)
    elif isinstance(made, Ingress):
        if made.admission.running:
            yield f"{made.admission.running} requests run"
        yield from _unused(made.client)
        yield from _sees(made.client.members.view, workers)
    elif isinstance(made, Client):
        yield from _unused(made)
        yield from _sees(made.members.view, workers)


def _balanced(what: str, check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        yield f"{what}: {where.name} {where.lineno}: {error or where.line}"


def _unused(client: Client) -> Iterator[str]:
    if client.streams or client.inbox.receivers:
        yield f"{client.streams} streams, {len(client.inbox.receivers)} in the inbox"


def _sees(view: Any, workers: set[str]) -> Iterator[str]:
    ready = {one.record.id for one in view.ready()}
    if ready != workers:
        yield f"sees {sorted(ready)} ready"


def _followed(world: World) -> Iterator[str]:
    """Each placement's index says of each worker and vault just what that has."""
    digests = {name: _digest(process.made) for name, process in world.processes.items()}
    truth = {name: digest for name, digest in digests.items() if digest is not None}
    for name, process in world.processes.items():
        if not isinstance(process.made, PlacementLoop):
            continue
        indexer = process.made.core.indexer
        for member, digest in truth.items():
            if world.home_of(member) is not world.home_of(name):
                continue
            if (state := indexer.state_of(member)) is not Follows.EXACT:
                yield f"{name} follows {member} as {state}"
            elif indexer._followers[member].tier_digest != digest:
                yield f"{name} takes {member} to have what it has not"


def _digest(made: Any) -> int | None:
    if isinstance(made, FakeWorker):
        return made.thread.engine.kv.digest
    return made.loop.log.digest if isinstance(made, Vault) else None
