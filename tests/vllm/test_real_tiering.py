"""A vLLM server whose own tiers move the blocks, with ours below them, and a worker's store beside it: all that is
missing of a GPU's is the copy between device and host, see `cpu_tiering`."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.vllm.engine_beside import engine_beside
from kvfleet.worker.vllm.restore_checks import RestoreChecks
from kvfleet.worker.vllm.result_queue import ResultQueue
from kvfleet.worker.vllm.shared_slots import SharedMemory, SharedSlots
from kvfleet.worker.vllm.step_rates import StepRates
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvfleet.worker.vllm.vllm_sequence import Sockets
from kvfleet.worker.vllm.vllm_server import Expected
from kvfleet.worker.vllm.vllm_server import VllmServer as VllmSide
from kvfleet.worker.vllm.vllm_tiers import VllmTiers
from kvproto.messages import Tier
from tests.engines.rigs import EngineRig, Recorder, greedy
from tests.support.vllm_server import ROOT, VllmServer
from tests.support.waiting import until

SIZE, BLOCK_BYTES = 32, 131_072
DEVICE, HOST, SLOTS = 40, 24, 256  # blocks
PROMPT, DRAWN = 600, 40
WHOLE = PROMPT // SIZE * SIZE


def transfer_config() -> str:
    """As docs/vllm.md has it, but for the copies of CPUs and a small host memory."""
    (shown,) = re.findall(r"```json\n(.*?KvfleetTier.*?)```", (ROOT / "docs" / "vllm.md").read_text(), re.DOTALL)
    config = json.loads(shown)
    offloading = config["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"]
    assert offloading["spec_name"] == "TieringOffloadingSpec"
    offloading |= {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.vllm.cpu_tiering"}
    offloading["cpu_bytes_to_use"] = HOST * BLOCK_BYTES
    return json.dumps(config)


@dataclass(eq=False)
class TieredRig(EngineRig):
    tiers: VllmTiers = field(kw_only=True)

    async def other_prompts(self) -> None:
        """As many as fill the device and vLLM's host memory."""
        for number in range(1, 5):
            await self.run(self.spec(f"other-{os.urandom(4).hex()}", self.prompt(PROMPT, number), greedy(1)))
        await self.settled()

    async def settled(self) -> None:
        """vLLM has saved what it saves: the last blocks a moment after the request."""
        before = -1
        while before != self.tiers.store.saved_total:
            before = self.tiers.store.saved_total
            await self.engine.erase(os.urandom(16), (0,), 0)  # a step of vLLM's, at least


@pytest.fixture(scope="module")
def tiered_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    flags = ("--kv-transfer-config", transfer_config(), "--num-gpu-blocks-override", str(DEVICE))
    server = VllmServer(
        tiny_llama, tmp_path_factory.mktemp("tiered"), *flags, "--max-model-len", "1024",
        without=("--kv-transfer-config",), env={"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"},
    )  # fmt: skip
    try:
        yield server.wait_ready()
    finally:
        status = server.stop()
    assert status == 0, server.log[-4000:]


@pytest.fixture
async def rig(tiered_server: VllmServer, tiny_llama: Path) -> AsyncIterator[TieredRig]:
    bundle = read_bundle(tiny_llama, "tiny", load_format="auto", dtype="auto", block_size=SIZE)
    tokenizer, recorder, rates = Tokenizer.from_str(bundle.tokenizer_json), Recorder(), StepRates()
    folder, fatal, wrong = Path(tempfile.mkdtemp(prefix="kvfleet-")), [], []
    sockets, wanted = Sockets(str(folder / "n"), str(folder / "d")), Expected(SIZE, None, "auto")
    side = VllmSide(TokenRoutes(tiered_server.url), sockets, wanted, fatal.append)
    await side.open()
    facts = await side.find()
    assert facts.moved is not None
    assert (facts.moved.nbytes, facts.moved.ranks) == (BLOCK_BYTES, 1)
    memory = SharedMemory(folder / "kv", SLOTS * BLOCK_BYTES)
    store = SharedSlots(
        memory, HostTier(memory.view, BLOCK_BYTES, SIZE), 1, side.news.grant, lambda changes: engine.on_changes(changes)
    )
    tiers = VllmTiers(
        store, side.blocks, rates, None, lambda worker: None, b"", RestoreChecks("float32", 1_000_000), wrong.append
    )
    engine = engine_beside(
        side, facts, tokenizer, bundle.stop_ids, ResultQueue(recorder.take), lambda: None, f"{folder.name}-",
        tiers, rates,
    )  # fmt: skip
    side.watch(engine)

    async def stop() -> None:
        await engine.stop()
        await side.close()
        shutil.rmtree(folder)
        assert not fatal
        assert not wrong

    one = TieredRig(
        engine, recorder, tokenizer, bundle.vocab_size, bundle.stop_ids, stop, has_kv=False, block_size=SIZE,
        tiers=tiers,
    )  # fmt: skip
    yield one
    await one.close()


async def test_blocks_come_back_from_the_worker(rig: TieredRig) -> None:
    prompt = rig.prompt(PROMPT)
    first = await rig.run(rig.spec("first", prompt, greedy(DRAWN)))
    assert first.cached_tokens == 0
    await until(lambda: rig.tiers.store.saved_total >= (PROMPT + DRAWN - 1) // SIZE, told="its blocks are saved")
    await rig.other_prompts()
    again = await rig.run(rig.spec("again", prompt, greedy(DRAWN)))
    assert again.ids == first.ids
    assert again.started is not None
    assert again.started.restored == {Tier.HOST: WHOLE}
    assert (await rig.tiers.rates())[Tier.HOST.value] > 0  # read from the worker's memory, not vLLM's
    assert not rig.tiers._held
    longer = await rig.run(rig.spec("turn", [*prompt, *first.ids, *rig.prompt(30, 7)], greedy(8)))
    assert longer.cached_tokens >= WHOLE


async def test_many_at_once_with_too_few_blocks(rig: TieredRig) -> None:
    specs = [rig.spec(f"r{number}", rig.prompt(500, 20 + number % 4), greedy(DRAWN)) for number in range(12)]
    alone = {}
    for number in range(4):
        fresh = rig.spec(f"alone-{number}", rig.prompt(500, 20 + number), greedy(DRAWN), root=os.urandom(16))
        alone[fresh.prompt_ids] = (await rig.run(fresh)).ids
    streams = await rig.run_all(*specs)
    assert [one.ids for one in streams] == [alone[spec.prompt_ids] for spec in specs]
    await until(lambda: not rig.tiers._held, told="vLLM has read all that it was told of")


async def test_what_is_erased_is_nowhere_in_vllm(rig: TieredRig) -> None:
    prompt = rig.prompt(PROMPT, 40)
    first = await rig.run(rig.spec("first", prompt, greedy(DRAWN)))
    await rig.settled()
    await rig.engine.erase(rig.root, (*prompt, *first.ids), 0)
    again = await rig.run(rig.spec("again", prompt, greedy(DRAWN)))
    assert (again.cached_tokens, again.ids) == (0, first.ids)
