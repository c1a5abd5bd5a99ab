"""A batch while everything ends: workers, the ingress that leads it, placement and the NATS server are killed, in turn.
Each line has one result, and it is the model's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproto.connection import Connection
from kvproto.testing.fixtures import ProcessFactory
from kvproto.testing.nats_process import PLAIN_CONFIG, NatsProcess, free_port
from tests.support.processes import Deployment
from tests.support.waiting import LIMIT_S

LINES, TOKENS = 120, 30


@pytest.fixture
async def deployment(
    nats_process: ProcessFactory, tmp_path: Path
) -> AsyncIterator[tuple[NatsProcess, Deployment, list[str]]]:
    (config := tmp_path / "server.conf").write_text(PLAIN_CONFIG)
    server = nats_process(config)
    fleet = Deployment(server.url, tmp_path)
    await asyncio.to_thread(fleet.init)
    fleet.start("placement", "p0")
    for worker in ("w0", "w1"):
        fleet.start_worker(worker, 400)
    ports = [fleet.port, free_port()]
    for number, port in enumerate(ports):
        fleet.start("ingress", f"i{number}", f"--port={port}")
    try:
        await asyncio.to_thread(fleet.wait_ready, 2)
        yield server, fleet, [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        await asyncio.to_thread(fleet.stop)


def line(number: int) -> str:
    body = {"model": "demo", "prompt": f"line {number}", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body})


async def asked(bases: list[str], path: str) -> Any:
    """By the first ingress that answers."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            for base in bases:
                try:
                    async with httpx.AsyncClient(base_url=base, timeout=5, trust_env=False) as http:
                        answer = await http.get(path)
                        if answer.status_code == 200:
                            return answer
                except httpx.HTTPError:
                    pass
            await asyncio.sleep(0.1)


async def test_each_line_has_one_result_whatever_is_killed(
    deployment: tuple[NatsProcess, Deployment, list[str]],
) -> None:
    server, fleet, bases = deployment
    async with httpx.AsyncClient(base_url=bases[0], timeout=LIMIT_S, trust_env=False) as http:
        data = "\n".join(map(line, range(LINES))).encode()
        file = (await http.post("/v1/files", files={"file": ("in", data)}, data={"purpose": "batch"})).json()["id"]
        said = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h"}
        batch = (await http.post("/v1/batches", json=said)).json()["id"]
        body = json.loads(line(7))["body"]
        expected = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]

    async def done() -> int:
        return int((await asked(bases, f"/v1/batches/{batch}")).json()["request_counts"]["completed"])

    async def some_more(count: int) -> None:
        wanted = await done() + count
        async with asyncio.timeout(LIMIT_S):
            while await done() < min(wanted, LINES - 5):
                await asyncio.sleep(0.1)

    await some_more(5)
    fleet.services["w0"].kill()
    fleet.start_worker("w0", 400)
    await some_more(5)
    for ingress in ("i0", "i1"):  # one of them leads
        fleet.services[ingress].kill()
        port = bases[int(ingress[1])].rsplit(":", 1)[1]
        fleet.start("ingress", ingress, f"--port={port}")
        await some_more(5)
    fleet.services["p0"].kill()
    fleet.start("placement", "p0")
    await some_more(5)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    told: dict[str, Any] = {}
    async with asyncio.timeout(2 * LIMIT_S):
        while told.get("status") != "completed":
            told = (await asked(bases, f"/v1/batches/{batch}")).json()
            await asyncio.sleep(0.2)
    assert told["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    answers = list(
        map(json.loads, (await asked(bases, f"/v1/files/{told['output_file_id']}/content")).text.splitlines())
    )
    assert [one["custom_id"] for one in answers] == [f"c{number}" for number in range(LINES)]
    assert answers[7]["response"]["body"]["choices"][0]["text"] == expected
    assert {one["response"]["body"]["usage"]["completion_tokens"] for one in answers} == {TOKENS}
    connection = await Connection.open(server.url, name="observer", inbox_prefix="_adm.o")

    async def left() -> int:
        info = await connection.raw.jetstream().stream_info("kvf_batch")
        return int(info.state.messages)

    async with asyncio.timeout(LIMIT_S):
        while await left():
            await asyncio.sleep(0.2)
    await connection.close()
