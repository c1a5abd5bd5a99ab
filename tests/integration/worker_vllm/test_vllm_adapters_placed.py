"""Adapters in a fleet: requests go where they are loaded, and stay there whatever becomes of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvfleet.cli.commands import app
from kvfleet.placement.main import serve as serve_placement
from kvfleet.placement.settings import PlacementSettings
from kvproto import codec
from kvproto.block_hash import TenantRoots
from kvproto.client import Client, Generation
from kvproto.errors import InvalidRequest, KvfleetError, ModelNotFound, NotFound
from kvproto.messages import AdminCommand, AdminRequest, Inspection, Sampling, Tokens
from kvproto.streams.stream import Stream
from kvservice.lifecycle import Lifecycle
from kvservice.lora_folder import LoraFolder
from tests.support.lora_adapter import write_adapter
from tests.support.vllm_worker import VllmFleet
from tests.support.waiting import until

PROMPT = tuple(range(100, 200))
SAMPLED = Sampling(max_tokens=80, temperature=0.9, seed=7, ignore_eos=True)
BASE = Generation("demo", SAMPLED, PROMPT)
RED = replace(BASE, model="red")
KEY = "a fleet's secret"


@pytest.fixture
async def placed(vllm_fleet: VllmFleet) -> AsyncIterator[None]:
    """With a placement; otherwise clients place by the ring."""
    life = Lifecycle()
    settings = PlacementSettings(
        id="p0", nats_url=vllm_fleet.nats_url, namespace=vllm_fleet.namespace, fleet_key=KEY, prestart_s=1.0
    )
    await serve_placement(settings, life)
    yield
    life.stop()
    await life.close()


@pytest.fixture
def red(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "red", 1)


async def read(stream: Stream) -> list[int]:
    async with stream:
        return [token async for event in stream if isinstance(event, Tokens) for token in event.ids]


async def ready(client: Client, model: str, *workers: str) -> None:
    await until(lambda: {one.record.id for one in client.members.view.ready(model)} == set(workers))


async def order(client: Client, worker: str, command: AdminCommand, path: Path | str = "") -> None:
    await client.admin(worker, AdminRequest(command, model="red", path=str(path)))


@pytest.mark.usefixtures("placed")
async def test_requests_go_where_it_is_loaded_and_no_further(vllm_fleet: VllmFleet, client: Client, red: Path) -> None:
    for worker, adapters in (("v0", {}), ("v1", {"red": str(red)}), ("v2", {"red": str(red)})):
        await vllm_fleet.start(worker, {"adapters": adapters}, fleet_key=KEY)
    await ready(client, "demo", "v0", "v1", "v2")
    await ready(client, "red", "v1", "v2")
    streams = [client.generate(replace(RED, prompt_ids=(number, *PROMPT))) for number in range(12)]
    await asyncio.gather(*map(read, streams))
    assert {stream.worker for stream in streams} == {"v1", "v2"}
    assert await read(client.generate(BASE)) != await read(client.generate(RED))
    with pytest.raises(ModelNotFound, match="'blue'"):
        await read(client.generate(replace(BASE, model="blue")))
    with pytest.raises(NotFound, match="v0 serves demo, not red"):
        await read(client.generate(replace(RED, worker="v0")))


@pytest.mark.parametrize("drains", [False, True])
async def test_a_stream_goes_on_only_where_its_adapter_is(
    vllm_fleet: VllmFleet, client: Client, red: Path, *, drains: bool
) -> None:
    """After a death, and after a drain."""
    for worker, adapters in (("v0", {}), ("v1", {"red": str(red)}), ("v2", {"red": str(red)}), ("v3", {})):
        await vllm_fleet.start(worker, {"adapters": adapters, "step_s": 0.005})
    await ready(client, "red", "v1", "v2")
    asked = replace(RED, sampling=replace(SAMPLED, max_tokens=300))
    whole = await read(client.generate(asked))
    stream, ids, going = client.generate(asked), [], None
    async with stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
            if len(ids) >= 20 and going is None:
                first = vllm_fleet.workers[str(stream.worker)]
                going = asyncio.create_task(first.stop() if drains else first.double.die())
    assert ids == whole
    assert stream.attempts > 1
    assert {stream.worker, first.settings.member} == {"v1", "v2"}
    assert going is not None
    await going


async def test_a_drain_keeps_what_nobody_else_can_serve(vllm_fleet: VllmFleet, client: Client, red: Path) -> None:
    """For as long as it may: another worker of the model is ready all the time."""
    await vllm_fleet.start("v0", {"adapters": {}})
    leaving = await vllm_fleet.start("v1", {"adapters": {"red": str(red)}, "step_s": 0.01}, drain_s=8.0)
    await ready(client, "demo", "v0", "v1")
    await ready(client, "red", "v1")
    stream, ids, going = client.generate(replace(RED, sampling=replace(SAMPLED, max_tokens=120))), [], None
    async with stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
                going = going or asyncio.create_task(leaving.stop())
    assert (len(ids), stream.attempts) == (120, 1)
    assert going is not None
    await going


@pytest.mark.usefixtures("placed")
async def test_loaded_and_unloaded_at_run_time(vllm_fleet: VllmFleet, client: Client, red: Path) -> None:
    for worker in ("v0", "v1"):
        await vllm_fleet.start(worker, {"adapters": {}}, fleet_key=KEY)
    await ready(client, "demo", "v0", "v1")
    with pytest.raises(ModelNotFound, match="'red'"):
        await read(client.generate(RED))
    await order(client, "v1", AdminCommand.LOAD_ADAPTER, red)
    await ready(client, "red", "v1")
    stream = client.generate(RED)
    first = await read(stream)
    assert stream.worker == "v1"
    await order(client, "v0", AdminCommand.LOAD_ADAPTER, red)
    await ready(client, "red", "v0", "v1")
    await order(client, "v1", AdminCommand.UNLOAD_ADAPTER)
    await ready(client, "red", "v0")
    stream = client.generate(RED)
    assert (await read(stream), stream.worker) == (first, "v0")
    await order(client, "v0", AdminCommand.UNLOAD_ADAPTER)
    await ready(client, "red")
    with pytest.raises(ModelNotFound, match="'red'"):
        await read(client.generate(RED))
    assert await read(client.generate(BASE))
    with pytest.raises(NotFound, match="no adapter 'red' is loaded"):
        await order(client, "v0", AdminCommand.UNLOAD_ADAPTER)


async def test_its_blocks_are_inspected_and_erased_by_its_name(
    vllm_fleet: VllmFleet, client: Client, red: Path
) -> None:
    """Also after it was unloaded."""
    await vllm_fleet.start("v0", {"adapters": {"red": str(red)}}, fleet_key=KEY)
    await ready(client, "red", "v0")
    record = client.members.view.workers["v0"].record
    assert [one.revision for one in record.adapters] == [LoraFolder.read(red).revision()]
    history = (*PROMPT, *await read(client.generate(RED)))

    async def cached(model: str) -> int:
        data = await client.admin("v0", AdminRequest(AdminCommand.INSPECT, "public", PROMPT, model=model))
        return codec.decode(Inspection, data).cached_tokens

    assert (await cached("red"), await cached("demo"), await cached("")) == (96, 0, 0)
    (body,) = vllm_fleet.workers["v0"].double.bodies
    lora = record.adapters[0].lora
    root = TenantRoots(record.model_revision, 16, (), KEY.encode(), lora).of("public", PROMPT)
    assert (body["model"], bytes.fromhex(body["cache_salt"])) == ("red", root)
    await order(client, "v0", AdminCommand.UNLOAD_ADAPTER)
    await client.admin("v0", AdminRequest(AdminCommand.ERASE, "public", history, model="red"))
    assert await cached("red") == 0
    with pytest.raises(ModelNotFound, match="'blue'"):
        await cached("blue")


async def test_a_bad_one_is_refused_to_who_asks(vllm_fleet: VllmFleet, client: Client, red: Path) -> None:
    await vllm_fleet.start("v0", {"adapters": {}})
    await ready(client, "demo", "v0")
    for path, says in ((write_adapter(red.parent / "wide", 1, hidden=4096), "of width 4096, not"), ("", "a path")):
        with pytest.raises(KvfleetError, match=says):
            await order(client, "v0", AdminCommand.LOAD_ADAPTER, path)
    with pytest.raises(InvalidRequest, match="rank 32 is greater than"):
        await order(client, "v0", AdminCommand.LOAD_ADAPTER, write_adapter(red.parent / "high", 1, rank=32))
    await ready(client, "red")


async def test_an_operator_loads_it_everywhere(vllm_fleet: VllmFleet, client: Client, red: Path) -> None:
    """And is told of each worker where it could not be."""
    for worker, adapters in (("v0", {}), ("v1", {}), ("v2", None)):
        await vllm_fleet.start(worker, {"adapters": adapters})
    await ready(client, "demo", "v0", "v1", "v2")
    at = ["--nats-url", vllm_fleet.nats_url, "--namespace", vllm_fleet.namespace]

    async def lora(*words: str) -> tuple[int, list[str], str]:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["lora", "red", *words, *at])
        return done.exit_code, sorted(done.stdout.split()), done.stderr

    code, loaded, told = await lora(str(red))
    assert (code, loaded) == (1, ["v0", "v1"])
    assert told == "worker v2: vLLM was started without --enable-lora\n"
    await ready(client, "red", "v0", "v1")
    assert await lora("--unload", "--worker", "v1") == (0, ["v1"], "")
    await ready(client, "red", "v0")
    code, _, told = await lora(str(red), "--model", "another")
    assert (code, told) == (1, "kvfleet: no vLLM worker of another is there\n")
