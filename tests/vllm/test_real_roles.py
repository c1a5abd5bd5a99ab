"""A worker for prompts and one for what comes after, each beside a real vLLM: processes, placement, NATS, data plane.

What each prompt has to come to is told by a worker of role `both` that serves it alone, before the other two decode.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest

from kvproto.client import Client, Generation
from kvproto.messages import Sampling, Started, State, Tokens
from kvproto.testing.nats_process import NatsProcess, free_port
from tests.support.processes import Deployment
from tests.support.vllm_server import ENGINE, NICENESS, PACED, SERVER, WORKER, VllmServer
from tests.support.waiting import LIMIT_S, until, wait_until

BLOCK = 32  # of vLLM's CPU build, and of the workers
CHUNK = 128  # tokens of a step,
STEP_S = 0.05  # which lasts so long at least: a prompt can be met on its way
OUTPUT = 48
STREAMS = 12  # beside which a prompt costs 8 times what it does alone
LONG, NEXT, OTHER, THIRD, FOURTH, SHORT = (
    tuple(7 + at * by % 900 for at in range(count))
    for count, by in ((1850, 13), (1850, 29), (1900, 17), (1800, 23), (1800, 31), (4, 19))
)  # SHORT: beside one stream worth no move, even where its prefill takes 80 ms
START_S = 120.0
GREEDY = Sampling(OUTPUT, temperature=0.0, ignore_eos=True)


@dataclass(eq=False)
class Fleet:
    """Workers beside the `engines`, by their ids; `alone`: the tokens of each prompt, by one worker of role both."""

    engines: Mapping[str, VllmServer]
    processes: Deployment
    ports: dict[str, int] = field(default_factory=dict)  # of metrics
    alone: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def start(self, role: str, name: str, *flags: str, env: dict[str, str] | None = None) -> None:
        self.ports[name] = free_port()
        self.processes.start(role, name, f"--metrics-port={self.ports[name]}", *flags, env=env)

    def start_worker(self, name: str, half: str, engine: str, env: dict[str, str] | None = None) -> None:
        self.start(
            "worker", name, "--engine=vllm", f"--engine-url={self.engines[engine].url}", f"--role={half}",
            f"--block-size={BLOCK}", f"--host-bytes={2**28}", "--drain-s=1", "--preload-s=0", "--workers-on-host=3",
            env=env,
        )  # fmt: skip

    def wait_ready(self, *names: str) -> None:
        for name in names:
            wait_until(partial(self._is_ready, name), START_S, told=self.processes.logs, pause_s=0.1)

    def _is_ready(self, name: str) -> bool:
        assert self.lives(name), self.processes.logs()
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.ports[name]}/readyz", trust_env=False).status_code == 200
        return False

    def lives(self, name: str) -> bool:
        return self.processes.services[name].process.poll() is None

    def metric(self, of: str, name: str) -> float:
        """0 for one that was not counted yet."""
        text = httpx.get(f"http://127.0.0.1:{self.ports[of]}/metrics", trust_env=False).text
        found = re.search(rf"^{re.escape(name)} ([0-9.e+]+)$", text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0


@pytest.fixture(scope="module")
def engines(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, VllmServer]]:
    """Alike, so that only what a prompt costs those beside it decides where it is prefilled."""
    flags = ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "16", *PACED)
    env = {"PACE_STEP_S": str(STEP_S)}
    with ExitStack() as stack:
        servers = {}
        for name in "pd":
            folder = tmp_path_factory.mktemp(name)
            servers[name] = VllmServer(tiny_llama, folder, *flags, env=env, niceness=NICENESS)
            stack.callback(_stop, servers[name])
        yield {name: server.wait_ready() for name, server in servers.items()}


def _stop(server: VllmServer) -> None:
    assert server.stop() == 0, server.log[-4000:]


@pytest.fixture(scope="module")
def fleet(engines: Mapping[str, VllmServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Worker `b` is ready, `p` and placement are starting."""
    folder = tmp_path_factory.mktemp("roles")
    with ExitStack() as stack:
        nats = NatsProcess(folder / "nats")
        nats.start()
        stack.callback(nats.stop)
        fleet = Fleet(engines, Deployment(nats.url, folder))
        stack.callback(fleet.processes.stop)
        fleet.processes.init()
        # Another key makes other roots: what it leaves in vLLM's cache is not found by those that come after.
        fleet.start_worker("b", "both", "d", {"KVFLEET_FLEET_KEY": "of another fleet"})
        fleet.start_worker("p", "prefill", "p")
        fleet.start("placement", "p0")
        fleet.wait_ready("b")
        yield fleet


@pytest.fixture(scope="module")
def halves(fleet: Fleet) -> Fleet:
    """Workers `p` and `d` alone."""
    if not fleet.alone:
        asyncio.run(ask_alone(fleet))
    assert fleet.processes.services["b"].stop() == 0
    fleet.start_worker("d", "decode", "d")
    fleet.wait_ready("p0", "p", "d")
    return fleet


@pytest.fixture
async def client(halves: Fleet, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """Both halves are ready."""
    monkeypatch.setattr("kvproto.streams.placing.PLACE_TIMEOUT_S", 5.0)  # on a busy machine too placement places
    if not halves.lives("p"):
        halves.start_worker("p", "prefill", "p")
        halves.wait_ready("p")
    async with await Client.open(halves.processes.nats_url) as client:
        await until(lambda: all(_is_known(client, halves, name) for name in ("p", "d")))
        yield client


@asynccontextmanager
async def decoding(client: Client, fleet: Fleet, streams: int) -> AsyncIterator[None]:
    """At worker `d`, as placement knows."""
    tasks = [asyncio.create_task(_decode(client, number)) for number in range(streams)]
    active = 'kvfleet_request_active_slots{worker="d"}'
    try:
        await until(lambda: fleet.metric("p0", active) == streams, pause_s=0.1)
        yield
        assert not any(one.done() for one in tasks)
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_known(client: Client, fleet: Fleet, name: str) -> bool:
    known = client.members.view.workers.get(name)
    return known is not None and known.record.pid == fleet.processes.services[name].pid and known.state is State.READY


async def _decode(client: Client, number: int) -> None:
    sampling = Sampling(1900, temperature=0.0, ignore_eos=True)
    while True:
        await read(client, Generation("tiny", sampling, (9 + number, *range(100, 140)), worker="d"))


async def read(client: Client, generation: Generation) -> tuple[list[int], list[Started]]:
    """All its tokens, and where its attempts began."""
    ids: list[int] = []
    starts: list[Started] = []
    async with client.generate(generation) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
            if (begun := stream.assembly.started) is not None and begun not in starts:
                starts.append(begun)
    return ids, starts


async def ask_alone(fleet: Fleet) -> None:
    async with await Client.open(fleet.processes.nats_url) as client:
        await until(lambda: _is_known(client, fleet, "b"))
        for prompt in (LONG, NEXT, OTHER, THIRD, FOURTH, SHORT):
            fleet.alone[prompt], (start,) = await read(client, Generation("tiny", GREEDY, prompt, worker="b"))
            assert (start.worker, start.cached_tokens, len(fleet.alone[prompt])) == ("b", 0, OUTPUT)


def test_each_server_runs(engines: Mapping[str, VllmServer]) -> None:
    """By itself, as starting both of them may take most of a test's time."""
    assert all(server.pids.keys() == {SERVER, ENGINE, WORKER} for server in engines.values())


async def test_a_worker_of_both_roles_serves_each_alone(fleet: Fleet) -> None:
    await ask_alone(fleet)


async def test_a_long_prompt_is_prefilled_there_and_goes_on_here_with_its_blocks(halves: Fleet, client: Client) -> None:
    await ask_for_pairs(client, halves, LONG, NEXT)
    assert halves.metric("p0", "kvfleet_placement_pairs_total") == 2


async def ask_for_pairs(client: Client, fleet: Fleet, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    """The first may be over before the two have met; blocks of the second are fetched while they are computed."""
    await ask_for_a_pair(client, fleet, first)
    assert await ask_for_a_pair(client, fleet, second) >= len(second) // BLOCK // 2


async def ask_for_a_pair(client: Client, fleet: Fleet, prompt: tuple[int, ...]) -> float:
    """Returns how many blocks were fetched ahead."""
    ahead = fleet.metric("d", "kvfleet_worker_ahead_blocks_total")
    moved = fleet.metric("p", "kvfleet_worker_moved_requests_total")
    async with decoding(client, fleet, STREAMS):
        ids, starts = await read(client, Generation("tiny", GREEDY, prompt))
    assert [one.worker for one in starts] == ["p", "d"], fleet.processes.logs()
    assert ids == fleet.alone[prompt]
    assert fleet.metric("p", "kvfleet_worker_moved_requests_total") == moved + 1
    there, here = starts
    assert there.cached == {}
    assert here.cached_tokens >= len(prompt) - 2 * BLOCK
    assert here.recomputed_tokens <= 2 * BLOCK
    return fleet.metric("d", "kvfleet_worker_ahead_blocks_total") - ahead


async def test_a_short_prompt_stays_where_it_decodes(halves: Fleet, client: Client) -> None:
    taken = halves.metric("p", "kvfleet_worker_requests_total")
    async with decoding(client, halves, 1):
        ids, starts = await read(client, Generation("tiny", GREEDY, SHORT))
    assert ids == halves.alone[SHORT]
    assert [one.worker for one in starts] == ["d"]
    assert halves.metric("p", "kvfleet_worker_requests_total") == taken


async def test_a_prefill_worker_that_dies_is_not_missed(halves: Fleet, client: Client) -> None:
    ids: list[int] = []
    generation = Generation("tiny", GREEDY, OTHER)
    async with decoding(client, halves, STREAMS), client.generate(generation) as stream:
        first = await until(lambda: stream.assembly.started)
        assert first is not None
        assert (first.worker, stream.assembly.tokens) == ("p", 0), "it is in the midst of its prompt"
        halves.processes.services["p"].kill()
        async with asyncio.timeout(LIMIT_S):
            async for event in stream:
                ids += event.ids if isinstance(event, Tokens) else ()
        last = stream.assembly.started
    assert ids == halves.alone[OTHER]
    assert last is not None
    assert last.worker == "d"


async def test_the_next_prefill_worker_takes_its_place(halves: Fleet, client: Client) -> None:
    """Beside the same vLLM, and with another address."""
    await ask_for_pairs(client, halves, THIRD, FOURTH)
