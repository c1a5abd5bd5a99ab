"""A real vLLM with a hybrid model beside a worker's host memory: blocks and states come back as they were."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfleet.worker.vllm.vllm_sequence import VllmSequence
from kvproto.messages import Tier
from tests.engines.rigs import Stream, greedy
from tests.support.tiny_hybrids import short_conv, write_tiny_hybrid
from tests.support.vllm_server import VllmServer, vllm_python
from tests.support.waiting import until
from tests.vllm.test_real_tiers import BLOCK, PROMPT, SLOTS, WHOLE, TiersRig, beside, restored

OUTPUTS = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()  # skips before it writes
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), short_conv)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(model, tmp_path_factory.mktemp("vllm"))
    try:
        yield server.wait_ready()
    finally:
        status = server.stop()
    assert status == 0, server.log[-4000:]


@pytest.fixture
async def rig(server: VllmServer, model: Path, tmp_path: Path) -> AsyncIterator[TiersRig]:
    rig = await beside(server.url, model, tmp_path, sampled=1)  # which asks for no check where there are states
    yield rig
    await rig.close()


async def saved(rig: TiersRig, prompt: tuple[int, ...]) -> Stream:
    """A first time. The host has all its blocks, and the states at the ends of the prompt and of all."""
    first = await rig.computed("first", prompt, lambda _: greedy(OUTPUTS))
    last = (PROMPT + len(first.ids) - 1) // BLOCK
    assert last > WHOLE // BLOCK
    ends = rig.hashes((*prompt, *first.ids))
    await until(lambda: set(rig.tiers.holdings()[Tier.STATE]) >= {ends[WHOLE // BLOCK - 1], ends[last - 1]})
    return first


async def test_from_the_host_the_text_is_the_same(rig: TiersRig) -> None:
    prompt = rig.prompt(PROMPT)
    first = await saved(rig, prompt)
    for number in range(2):
        await rig.off_device(prompt)
        again = await rig.run(rig.spec(f"again{number}", prompt, greedy(OUTPUTS)))
        assert (restored(again), again.result) == ({Tier.HOST: WHOLE}, first.result)
    assert rig.tiers.loads()["state"].restores_total == 2


async def test_from_a_vault_the_text_is_the_same(rig: TiersRig) -> None:
    prompt = rig.prompt(PROMPT)
    first = await saved(rig, prompt)
    rig.tiers.keep(rig.hashes(prompt))
    await rig.tiers.settled()
    await rig.off_device(prompt)
    rig.off_host()
    assert rig.tiers.holdings() == {Tier.HOST: [], Tier.STATE: []}
    again = await rig.run(rig.from_vault(rig.spec("again", prompt, greedy(OUTPUTS))))
    assert (restored(again), again.result) == ({Tier.VAULT: WHOLE}, first.result)


async def test_what_goes_on_finds_the_state_behind_the_answer(rig: TiersRig) -> None:
    """As a stream does that another worker had begun, or a next turn."""
    prompt = rig.prompt(PROMPT)
    first = await saved(rig, prompt)
    end = (PROMPT + len(first.ids) - 1) // BLOCK * BLOCK
    told = end + 1 - PROMPT
    await rig.off_device(prompt)
    rest = await rig.run(rig.spec("rest", (*prompt, *first.ids[:told]), greedy(OUTPUTS - told)))
    assert (restored(rest), rest.ids) == ({Tier.HOST: end}, first.ids[told:])


async def test_what_is_erased_is_nowhere(rig: TiersRig) -> None:
    prompt = rig.prompt(PROMPT)
    first = await saved(rig, prompt)
    assert await rig.engine.erase(rig.root, [*prompt, *first.ids], 0)
    assert rig.tiers.holdings() == {Tier.HOST: [], Tier.STATE: []}
    again = await rig.run(rig.spec("again", prompt, greedy(OUTPUTS)))
    assert (again.cached_tokens, again.result) == (0, first.result)


async def test_a_load_that_fails_is_computed_and_vllm_lives(rig: TiersRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends where it is told of blocks of several groups; it is told of the request."""
    prompt = rig.prompt(PROMPT)
    first = await saved(rig, prompt)
    prepare = rig.tiers.prepare

    async def lying(sequence: VllmSequence) -> dict[str, Any]:
        told = await prepare(sequence)
        told["restore"]["state"] = [SLOTS] * len(told["restore"]["state"])
        return told

    await rig.off_device(prompt)
    monkeypatch.setattr(rig.tiers, "prepare", lying)
    failed = await rig.run(rig.spec("failed", prompt, greedy(OUTPUTS)))
    assert failed.result == first.result
