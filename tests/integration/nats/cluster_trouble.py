"""Three servers: what a cluster loses, one after the other, under streams and new requests.

A process of its own, begun before all other tests and judged after them: elections alone take half a minute.
Prints one line for each part that held.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

from kvproto.connection import Connection
from kvproto.testing.nats_cluster import SYSTEM_USER, NatsCluster
from kvproto.testing.nats_process import NatsProcess
from tests.support.trouble import Fleet, fleet_over
from tests.support.waiting import LIMIT_S, until

WITHOUT_A_LEADER_S = 8.0


async def main(folder: Path) -> None:
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)  # the servers must not stay
    cluster = NatsCluster(folder)
    cluster.start()
    try:
        await cluster.ready()
        async with fleet_over(cluster.urls, workers=3, replicas=3, system_user=SYSTEM_USER) as fleet:
            epochs = fleet.epochs()
            for part in PARTS:
                began = time.monotonic()
                await part(fleet, cluster)
                fleet.check(epochs)
                print(part.__name__, f"{time.monotonic() - began:.1f} s", flush=True)
    finally:
        cluster.stop()


async def server_of(connection: Connection, cluster: NatsCluster) -> NatsProcess:
    """The one that it is connected to, once it is to any."""
    await until(lambda: connection.raw.connected_url)
    return cluster.node_at(connection.raw.connected_url.netloc)


async def lose_the_clients_server(fleet: Fleet, cluster: NatsCluster) -> None:
    await lose(await server_of(fleet.client.connection, cluster), fleet)


async def lose_the_leader(fleet: Fleet, cluster: NatsCluster) -> None:
    """The one that takes the members' records: nobody's can be renewed until another is elected."""
    members = f"KV_{fleet.subjects.members_bucket}"
    await lose(await cluster.leader_of(members), fleet)
    await cluster.ready([members])


async def lose(server: NatsProcess, fleet: Fleet) -> None:
    """Killed under streams; a new request is served before it is back."""
    streams = await fleet.start_streams(6, 100)
    server.kill()
    await fleet.serve(within_s=10)
    await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
    server.start()
    await until(fleet.is_whole)


async def retire_one(fleet: Fleet, cluster: NatsCluster) -> None:
    """Lame duck, as an orderly restart begins: its clients go to the others, and no worker is taken for dead."""
    server = await server_of(fleet.workers.workers["w1"].connection, cluster)
    streams = await fleet.start_streams(6, 100)
    await asyncio.to_thread(server.retire)
    await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
    server.start()
    await until(fleet.is_whole)


async def hang_a_workers_server(fleet: Fleet, cluster: NatsCluster) -> None:
    server = await server_of(fleet.workers.workers["w0"].connection, cluster)
    streams = await fleet.start_streams(6, 100)
    server.hang()
    await fleet.serve()
    await asyncio.sleep(6.0)
    server.wake()
    await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
    await until(fleet.is_whole)
    await fleet.leases_are_written()


async def lose_the_majority(fleet: Fleet, cluster: NatsCluster) -> None:
    """Core NATS lives on in the one left: streams and requests go on, and everybody stays known."""
    left = await server_of(fleet.client.connection, cluster)
    streams = await fleet.start_streams(6, 200)
    for server in cluster.others(left):
        server.kill()
    await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
    await asyncio.sleep(WITHOUT_A_LEADER_S)
    assert fleet.is_whole(), "by heartbeats, and because nobody's record is renewed"
    assert (await fleet.serve(within_s=5)).attempts == 1
    for server in cluster.others(left):
        server.start()
    await cluster.ready()
    await fleet.leases_are_written()


PARTS = (lose_the_clients_server, lose_the_leader, retire_one, hang_a_workers_server, lose_the_majority)

if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
