"""Adapters of a vLLM server: found, loaded and unloaded while it runs, with blocks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvfleet.worker.vllm.foreign_blocks import ForeignBlocks, salt_of_root
from kvproto.block_hash import TenantRoots, chain
from kvproto.errors import EngineFailure, InvalidRequest, NotFound, Unavailable
from kvproto.messages import Adapter
from kvservice.lora_folder import LoraFolder
from tests.engines.rigs import greedy, key_of, whole
from tests.support.lora_adapter import write_adapter
from tests.support.vllm_double.block_cache import BlockCache, Lora, hashes_of
from tests.support.vllm_rig import Starts, VllmRig
from tests.support.waiting import until


@pytest.fixture
def red(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "red", 1)


def root_of(adapter: Adapter) -> bytes:
    root = TenantRoots("m", 16, (), b"key", adapter.lora).of("public", ())
    assert isinstance(root, bytes)
    return root


def named(rig: VllmRig, name: str = "red") -> Adapter:
    return next(one for one in rig.server.adapters.loaded if one.name == name)


async def refusal(rig: VllmRig, name: str, path: Path | str) -> str:
    before = rig.server.adapters.loaded
    with pytest.raises(InvalidRequest) as refused:
        await rig.server.adapters.load(name, str(path))
    assert rig.server.adapters.loaded == before
    return str(refused.value)


async def test_those_of_its_start_are_found(starts: Starts, red: Path) -> None:
    rig = await starts(adapters={"red": str(red)})
    assert rig.server.adapters.loaded == (Adapter("red", LoraFolder.read(red).revision()),)
    assert (await starts()).server.adapters.loaded == ()


async def test_each_computes_and_caches_for_itself(starts: Starts, red: Path, tmp_path: Path) -> None:
    rig = await starts(adapters={"red": str(red), "blue": str(write_adapter(tmp_path / "blue", 2))})
    prompt = rig.prompt(100)
    roots = {"": rig.root, **{name: root_of(named(rig, name)) for name in ("red", "blue")}}

    async def ask(number: int) -> list[tuple[tuple[int, ...], int]]:
        specs = [
            rig.spec(f"{name}{number}", prompt, greedy(12), adapter=name, root=root) for name, root in roots.items()
        ]
        return [(stream.ids, stream.cached_tokens) for stream in await rig.run_all(*specs)]

    first, again = await ask(1), await ask(2)
    assert [cached for _, cached in first] == [0, 0, 0]
    assert {cached for _, cached in again} == {whole(99)}
    assert [ids for ids, _ in first] == [ids for ids, _ in again]
    assert len({ids for ids, _ in first}) == 3
    assert [body["model"] for body in rig.double.bodies[:3]] == ["demo", "red", "blue"]
    held = set(rig.server.blocks.hashes())
    for root in roots.values():
        assert held >= set(chain(root, prompt[:96], 16))
    assert rig.server.blocks.left_out_total == 0


async def test_loaded_and_unloaded_while_it_runs(starts: Starts, red: Path) -> None:
    rig = await starts(adapters={})
    await rig.server.adapters.load("red", str(red))
    adapter = named(rig)
    assert adapter == Adapter("red", LoraFolder.read(red).revision())
    spec = rig.spec("r", rig.prompt(40), greedy(8), adapter="red", root=root_of(adapter))
    assert (await rig.run(spec)).ids
    await rig.server.adapters.unload("red")
    assert rig.server.adapters.loaded == ()
    late = rig.spec("late", rig.prompt(40), greedy(8), adapter="red", root=root_of(adapter))
    assert type((await rig.run(late)).error) is Unavailable  # another worker may have it
    with pytest.raises(NotFound, match="'red'"):
        await rig.server.adapters.unload("red")


async def test_what_runs_when_it_is_unloaded_goes_on(starts: Starts, red: Path) -> None:
    rig = await starts(adapters={"red": str(red)}, step_s=0.005)
    spec = rig.spec("r", rig.prompt(40), greedy(60), adapter="red", root=root_of(named(rig)))
    undisturbed = await rig.run(spec)
    running = rig.spec("running", rig.prompt(40), greedy(60), adapter="red", root=spec.root)
    rig.submit(running)
    await rig.until_tokens(running, 5)
    await rig.server.adapters.unload("red")
    await rig.until(key_of(running))
    assert rig.stream(key_of(running)).ids == undisturbed.ids


async def test_what_cannot_be_loaded_is_said_in_one_line(starts: Starts, red: Path, tmp_path: Path) -> None:
    rig = await starts(adapters={"red": str(red)})
    rig.server.adapters.model = {"hidden_size": 256}
    assert (await refusal(rig, "red", red)).endswith("'red' is loaded already: unload it first")
    assert "No adapter found for /nowhere" in await refusal(rig, "blue", "/nowhere")
    high = await refusal(rig, "high", write_adapter(tmp_path / "high", 1, rank=32))
    assert high.endswith("vLLM refuses it: LoRA rank 32 is greater than max_lora_rank 16.")
    assert "of width 64, not 256" in await refusal(rig, "thin", write_adapter(tmp_path / "thin", 1, hidden=64))
    (red / "adapter_model.safetensors").unlink()
    assert "there is no adapter_model.safetensors in it" in await refusal(rig, "blue", red)


@pytest.mark.parametrize(
    ("made", "says"),
    [({}, "without --enable-lora"), ({"adapters": {}, "loads": False}, "without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")],
)
async def test_a_server_that_takes_none_says_what_it_lacks(
    starts: Starts, red: Path, made: dict[str, Any], says: str
) -> None:
    assert says in await refusal(await starts(**made), "red", red)


async def test_another_of_the_same_name_and_path_is_another(starts: Starts, red: Path) -> None:
    """vLLM itself would find the blocks of the first one."""
    rig = await starts(adapters={"red": str(red)})
    before, prompt = named(rig), rig.prompt(100)
    first = await rig.run(rig.spec("first", prompt, greedy(12), adapter="red", root=root_of(before)))
    await rig.server.adapters.unload("red")
    write_adapter(red, 9)
    await rig.server.adapters.load("red", str(red))
    assert named(rig).revision != before.revision
    second = await rig.run(rig.spec("second", prompt, greedy(12), adapter="red", root=root_of(named(rig))))
    assert (second.cached_tokens, second.ids == first.ids) == (0, False)


async def test_one_whose_files_cannot_be_read_here_shares_with_nobody(
    starts: Starts, red: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a path that is another folder here, as a relative one may be."""
    monkeypatch.chdir(red.parent)
    here, there = await starts(adapters={"red": "red"}), await starts(adapters={"red": "red"})
    revisions = {named(rig).revision for rig in (here, there)} | {LoraFolder.read(red).revision()}
    assert len(revisions) == 3


async def test_after_a_restart_it_has_those_of_its_start_and_those_that_were_loaded(
    starts: Starts, red: Path, tmp_path: Path
) -> None:
    rig = await starts(adapters={"red": str(red)})
    for seed, name in enumerate(("blue", "green"), 2):
        await rig.server.adapters.load(name, str(write_adapter(tmp_path / name, seed)))
    before = {one.name: one for one in rig.server.adapters.loaded}
    await rig.double.die()
    (tmp_path / "green" / "adapter_config.json").unlink()
    await until(lambda: not rig.engine.is_ready)
    await rig.double.start()
    await until(lambda: rig.engine.is_ready)
    assert set(rig.double.adapters) == {"red", "blue"}
    assert {one.name: one for one in rig.server.adapters.loaded} == {name: before[name] for name in ("red", "blue")}


async def test_one_that_is_away_loads_nothing(starts: Starts, red: Path) -> None:
    rig = await starts(adapters={})
    await rig.double.die()
    with pytest.raises(EngineFailure):
        await rig.server.adapters.load("red", str(red))
    assert rig.server.adapters.loaded == ()
    await rig.double.start()


def test_a_name_that_looks_like_a_root_is_not_taken_for_one() -> None:
    """vLLM tells an adapter's name before the salt."""
    root, false = bytes(16), "ab" * 16
    lora = Lora(false, "/path", 0)
    cache, ids = BlockCache(4, 16), list(range(32))
    cache.store(cache.allocate(2), hashes_of(salt_of_root(root), ids, 16, lora), ids, salt_of_root(root), lora)
    blocks = ForeignBlocks(16)
    blocks.apply(cache.events)
    assert set(blocks.hashes()) == set(chain(root, ids, 16))
