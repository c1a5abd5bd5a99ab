"""An ingress on a socket that it inherits, as from systemd, which goes on to hold it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import httpx
from scripted_worker import ScriptedWorker

from kvproto.subjects import Subjects
from kvservice import launch
from tests.support.waiting import LIMIT_S


async def start(nats_url: str, namespace: str, listener: socket.socket, log: Path) -> asyncio.subprocess.Process:
    port = listener.getsockname()[1]
    flags = [f"--nats-url={nats_url}", f"--namespace={namespace}", f"--port={port}"]
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *launch.command("kvfleet.ingress.main", *flags, f"--listen-fd={listener.fileno()}"),
            stdout=output, stderr=output, env=os.environ, pass_fds=[listener.fileno()],
        )  # fmt: skip


async def test_whoever_connects_between_two_lives_waits_for_the_second(
    nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base, timeout=LIMIT_S, trust_env=False) as http:
            for number in (-9, 0):
                asked = asyncio.create_task(http.get("/health"))  # before it is there
                process = await start(nats_url, fleet_buckets.namespace, listener, tmp_path / "log")
                try:
                    assert (await asked).status_code == 200, "it knew its worker before it said anything"
                finally:
                    process.kill() if number else process.terminate()
                    assert await asyncio.wait_for(process.wait(), LIMIT_S) == number
            with socket.create_connection(listener.getsockname(), timeout=5):
                pass  # it closed its own hold alone


async def test_what_is_no_socket_is_one_line(nats_url: str, fleet_buckets: Subjects, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        number = file.fileno()
        flags = [f"--nats-url={nats_url}", f"--namespace={fleet_buckets.namespace}", f"--listen-fd={number}"]
        process = await asyncio.create_subprocess_exec(
            *launch.command("kvfleet.ingress.main", *flags, "--log-level=warning"),
            stderr=asyncio.subprocess.PIPE, env=os.environ, pass_fds=[number],
        )  # fmt: skip
        _, said = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 1
    assert said.decode().startswith(f"kvfleet ingress: listen_fd: {number} is no socket: ")
    assert said.count(b"\n") == 1
