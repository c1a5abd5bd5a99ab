"""Runs inside a lab: a stream's worker is cut off from the network, and comes back. Prints what was seen as JSON.

python -m tests.chaos.partition_scenario FOLDER HOST...        HOST: name=namespace=cable=address
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvproto.buckets import ensure_buckets
from kvproto.client import Client, Generation
from kvproto.connection import Connection
from kvproto.messages import Finished, Sampling, Started, Tokens
from kvproto.subjects import INGRESS_INBOX, Subjects, inbox_prefix
from tests.chaos.lab import ADDRESS, Host
from tests.support.processes import KVFLEET
from tests.support.waiting import LIMIT_S, until

URL = f"nats://{ADDRESS}:4222"
TOKENS, CUT_AT = 300, 40
TOKENS_PER_S = 200


def nats_server(folder: Path) -> subprocess.Popen[bytes]:
    config = folder / "nats.conf"
    config.write_text(f'ping_interval: "2s"\nping_max: 2\njetstream {{ store_dir: "{folder}/js" }}\n')
    binary = str(Path(sys.executable).with_name("nats-server"))
    return subprocess.Popen([binary, "-a", ADDRESS, "-p", "4222", "-c", str(config)], stderr=subprocess.DEVNULL)


def worker(host: Host, folder: Path) -> subprocess.Popen[bytes]:
    flags = [
        f"--id={host.name}", f"--nats-url={URL}", "--runner=fake", f"--fake-tokens-per-s={TOKENS_PER_S}",
        "--workers-on-host=2", f"--data-plane-host={host.address}", "--drain-s=1", "--preload-s=0",
    ]  # fmt: skip
    with (folder / f"{host.name}.log").open("ab") as log:
        return subprocess.Popen(host.command(KVFLEET, "worker", *flags), stdout=log, stderr=log)


async def opened() -> Connection:
    while True:
        try:
            return await Connection.open(URL, name="ingress-lab", inbox_prefix=inbox_prefix(INGRESS_INBOX, "lab"))
        except Exception:  # noqa: BLE001 - it is only just starting
            await asyncio.sleep(0.05)


async def stream(client: Client, name: str, cuts: dict[str, Host]) -> dict[str, Any]:
    """Greedy, so that every run says the same; of the hosts in `cuts` the one that has it is cut off in the middle."""
    sampling = Sampling(TOKENS, temperature=0.0, ignore_eos=True)
    ids: list[int] = []
    gap, last, workers = 0.0, time.monotonic(), []
    asked = Generation("demo", sampling, prompt_ids=tuple(range(100, 164)), request=name)
    async with client.generate(asked) as events:
        async for event in events:
            now = time.monotonic()
            if isinstance(event, Started):
                workers.append(event.worker)
            elif isinstance(event, Tokens):
                ids += event.ids
                gap, last = max(gap, now - last), now
                if len(ids) >= CUT_AT and workers[0] in cuts:
                    cuts.pop(workers[0]).cut()
            elif isinstance(event, Finished):
                workers.append(event.worker)
    return {"ids": ids, "gap_s": gap, "workers": workers}


async def scenario(folder: Path, hosts: list[Host]) -> dict[str, Any]:
    connection = await opened()
    subjects = Subjects()
    await ensure_buckets(connection, subjects)
    processes = [worker(host, folder) for host in hosts]
    try:
        client = await Client.over(connection, subjects)
        view = client.members.view
        await until(lambda: sum(1 for _ in view.ready("demo")) == len(hosts))
        epochs = {name: known.record.epoch for name, known in view.workers.items()}
        unbroken = await stream(client, "a" * 26, {})
        broken = await stream(client, "b" * 26, {host.name: host for host in hosts})
        lost = broken["workers"][0]
        await until(lambda: not view.is_alive(lost))
        for host in hosts:
            host.heal()
        await until(lambda: view.is_alive(lost))
        after = await stream(client, "c" * 26, {})
        late = client.inbox.orphan_frames_total
        await client.close()
        return {
            "equal": unbroken["ids"] == broken["ids"] == after["ids"],
            "tokens": len(broken["ids"]),
            "gap_s": broken["gap_s"],
            "workers": broken["workers"],
            "same_epoch": view.workers[lost].record.epoch == epochs[lost],
            "late_frames_dropped": late,
        }
    finally:
        for host in hosts:
            host.heal()
        for process in processes:
            process.terminate()
        codes = [await asyncio.to_thread(process.wait, LIMIT_S) for process in processes]
        await connection.close()
        print("exit codes", codes, file=sys.stderr)


def main(folder: Path, hosts: list[Host]) -> None:
    server = nats_server(folder)
    try:
        print(json.dumps(asyncio.run(scenario(folder, hosts))), flush=True)
    finally:
        server.terminate()
        server.wait(LIMIT_S)


if __name__ == "__main__":
    lab = os.environ["LAB"]
    named = [one.split("=") for one in sys.argv[2:]]
    main(Path(sys.argv[1]), [Host(name, space, lab, cable, address) for name, space, cable, address in named])
