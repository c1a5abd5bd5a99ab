"""Loop: what is still held when nothing runs any more: at workers, placements, ingresses and in the clients."""

from __future__ import annotations

import asyncio
import os
import time

import httpx

from kvproto import codec
from kvproto.client import Client
from kvproto.connection import Message
from kvproto.errors import KvfleetError
from kvproto.messages import AdminCommand, AdminRequest, PlacementStats, WorkerStats
from tests.chaos.fleet import Fleet, key_of
from tests.chaos.history import Leak
from tests.chaos.layout import Role

QUIET_S = 25.0  # the longest anything may be held after the last stream has ended


async def find_leaks(fleet: Fleet, clients: dict[str, Client], subscriptions: dict[str, int]) -> list[Leak]:
    """What is left after a while of quiet; returns as soon as nothing is. `subscriptions`: of each client before."""
    end = time.monotonic() + QUIET_S
    while True:
        held = await _held(fleet, clients, subscriptions)
        if not held or time.monotonic() > end:
            return held
        await asyncio.sleep(0.5)


async def _held(fleet: Fleet, clients: dict[str, Client], subscriptions: dict[str, int]) -> list[Leak]:
    workers = [place.name for place in fleet.layout.of_role(Role.WORKER)]
    of_workers = await asyncio.gather(*(_of_worker(fleet, name) for name in workers))
    out = [leak for some in of_workers for leak in some]
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
        for name, port in fleet.ports.items():
            headers = {"Authorization": f"Bearer {key_of('public')}"}
            try:
                answer = await http.get(f"http://127.0.0.1:{port}/stats", headers=headers)
            except httpx.HTTPError as error:
                out.append(Leak(name, f"does not answer: {type(error).__name__}"))
                continue
            active = answer.json()["ingress"]["active_streams"] if answer.status_code == 200 else answer.text[:200]
            if active:
                out.append(Leak(name, f"active streams: {active}"))
    out += await _of_placements(fleet)
    for tenant, client in clients.items():
        if client.streams or len(client.inbox.receivers):
            out.append(
                Leak(f"client of {tenant}", f"{client.streams} streams, {len(client.inbox.receivers)} in the inbox")
            )
        if client.connection.subscriptions > subscriptions[tenant]:
            more = client.connection.subscriptions - subscriptions[tenant]
            subjects = sorted(one.subject for one in client.connection.raw._subs.values())
            out.append(Leak(f"client of {tenant}", f"{more} subscriptions more than before: {', '.join(subjects)}"))
    tasks = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("stream-")]
    if tasks:
        out.append(Leak("clients", f"tasks {tasks}"))
    return out


async def _of_worker(fleet: Fleet, name: str) -> list[Leak]:
    try:
        data = await fleet.observer.admin(name, AdminRequest(AdminCommand.STATS))
    except (KvfleetError, TimeoutError) as error:
        return [Leak(name, f"does not answer: {type(error).__name__} {error}")]
    load = codec.decode(WorkerStats, data).heartbeat.load
    held = {"waiting": load.waiting, "running": load.running, "blocks held": load.blocks_used}
    held["prompt tokens queued"] = load.queued_prefill_tokens
    return [Leak(name, f"{count} {what}") for what, count in held.items() if count]


async def _of_placements(fleet: Fleet) -> list[Leak]:
    connection, answers = fleet.observer.connection, []

    async def on_answer(message: Message) -> None:
        answers.append(codec.decode(PlacementStats, message.data))

    inbox = f"{connection.inbox_prefix}.{os.urandom(6).hex()}"
    subscription = await connection.subscribe(inbox, on_answer)
    await connection.publish(fleet.subjects.placement_stats(), b"", reply=inbox)
    await asyncio.sleep(0.3)
    await subscription.unsubscribe()
    expected = {place.name for place in fleet.layout.of_role(Role.PLACEMENT)}
    workers = {place.name for place in fleet.layout.of_role(Role.WORKER)}
    out = [Leak(name, "does not answer") for name in sorted(expected - {one.placement for one in answers})]
    for one in answers:
        if one.booked:
            out.append(Leak(one.placement, f"{one.booked} bookings"))
        if set(one.workers) != workers:
            out.append(Leak(one.placement, f"sees the workers {sorted(one.workers)}"))
        elif one.workers_exact != len(workers):
            out.append(Leak(one.placement, f"follows the blocks of {one.workers_exact} of {len(workers)} workers"))
    return out
