"""Hybrid models: logits equal transformers', whatever is reused from snapshots, chunked, preempted or forked."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_against_transformers import assert_exact, storm, tokens
from tiny_configs import HYBRIDS
from tiny_models import ROOT, Rig, make_model

from kvcpu.attention.backend import CpuBackend
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.engine.engine_factory import build_engine
from kvfleet.worker.model.loader import adopt_model
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.model.probe import layout_of
from kvfleet.worker.port.outputs import SequenceStarted
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.settings import WorkerSettings
from kvproto.messages import Beams, ChoiceFinished, Sampling, Tier, Tokens
from tests.support.waiting import LIMIT_S, wait_until

# transformers' own logits, computed in chunks with a cache, differ from those of one pass by up to 5e-4 here.
TOLERANCE = 3e-3


@pytest.fixture(params=HYBRIDS, scope="module")
def hybrid(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


def generated(model: Any, prompt: list[int], count: int, **asked: Any) -> list[list[int]]:
    told = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | asked
    found = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **told)
    return [row[len(prompt) :] for row in found.tolist()]


def choices(rig: Rig, prompt: list[int], sampling: Sampling) -> dict[int, list[int]]:
    for choice in range(sampling.n):
        rig.engine.add(SequenceSpec("several", 0, tuple(prompt), sampling, ROOT, choice=choice))
    told: dict[int, list[int]] = {choice: [] for choice in range(sampling.n)}
    while rig.engine.has_work:
        outputs = rig.engine.step().outputs
        rig.engine.check_integrity()
        rig.runner.noted.clear()
        for output in outputs:
            if isinstance(output, Tokens):
                told[output.choice] += output.ids
            assert not hasattr(output, "error"), output
    assert any(isinstance(output, ChoiceFinished) for output in outputs)
    return told


def test_a_storm_of_turns_forks_and_preemptions(hybrid: Any) -> None:
    rig = Rig(hybrid, backend=CpuBackend(), blocks=14, block_size=8, budget=24, slots=8, states=8, every=1)
    storm(rig, seed=2, rate=0.7, longest=30, requests=14)
    assert_exact(rig, TOLERANCE)
    load = rig.engine.load()
    assert rig.slots is not None
    assert load.preemptions_total > 0
    assert rig.slots.evictions > 0
    assert sum(turn.cached for turn in rig.turns.values()) > 0


def test_turns_go_on_from_their_end_and_forks_from_the_last_snapshot(hybrid: Any) -> None:
    """And a wrong snapshot is noticed: the comparison would be worthless if it did not fail then."""
    chance = random.Random(3)
    rig = Rig(hybrid, blocks=64, block_size=16, budget=37)
    first = rig.add("first", tokens(chance, 70), 6)
    rig.add("beside", tokens(chance, 41), 10)
    rig.run()
    rig.add("second", first.ids + tokens(chance, 40), 6)
    rig.add("forked", first.ids[:52] + tokens(chance, 7), 6)
    rig.run()
    assert rig.turns["second"].cached == 75
    assert rig.turns["forked"].cached == 32  # 3 of its blocks are cached, the second one ends at a snapshot
    assert_exact(rig, TOLERANCE)
    assert rig.runner.states is not None
    for part in rig.runner.states.shape.parts:
        rig.runner.states.parts(part.layer)[part.name].mul_(1.5)
    rig.add("corrupted", first.ids[:40] + tokens(chance, 5), 6)
    rig.run()
    worst = rig.differences()
    assert worst.pop("corrupted") > 10 * TOLERANCE
    assert max(worst.values()) < TOLERANCE


def test_what_is_generated_is_what_generate_gives(hybrid: Any) -> None:
    """Greedy, as several choices of one prompt, and as beams, each of which has a state of its own."""
    prompt = tokens(random.Random(5), 45)
    rig = Rig(hybrid, blocks=64, block_size=16, budget=32)
    (greedy,) = generated(hybrid, prompt, 12)
    assert choices(rig, prompt, Sampling(12, temperature=0.0, n=2)) == {0: greedy, 1: greedy}
    assert rig.slots is not None
    assert any(len(rig.slots[slot].ids) == 44 % 16 for slot in rig.slots), "the second choice began at no fork"
    beams = generated(hybrid, prompt, 10, num_beams=3, num_return_sequences=2)
    assert choices(rig, prompt, Sampling(10, temperature=0.0, n=2, beams=Beams(3))) == dict(enumerate(beams))


def test_the_size_of_a_state_is_known_from_the_configuration_alone(hybrid: Any) -> None:
    layout, loaded = layout_of(hybrid.config, 256), adopt_model(hybrid)
    assert loaded.states is not None
    assert layout.layers == loaded.kv_shape.layers
    assert layout.state_bytes * 2 >= loaded.states.nbytes >= layout.state_bytes > 0  # there in bfloat16


def write_folder(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    for file in DEMO_FOLDER.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    config = HYBRIDS[name]()
    config.vocab_size = json.loads((DEMO_FOLDER / "config.json").read_text())["vocab_size"]
    config.save_pretrained(folder)


IN_A_WORKER = """
import sys
from pathlib import Path
from kvfleet.worker.model.quick_imports import defer_compiler
defer_compiler()
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.engine.engine_factory import build_engine
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.settings import WorkerSettings
from kvproto.messages import Sampling
for name in sys.argv[1:]:
    folder = Path(name)
    settings = WorkerSettings(model=name, load_format="dummy", threads=1, blocks=32, states=4, host_bytes=0)
    bundle = read_bundle(folder, "m", load_format="dummy", dtype="float32", block_size=16)
    engine = build_engine(settings, folder, bundle)
    engine.add(SequenceSpec("r", 0, tuple(range(1, 30)), Sampling(4, temperature=0.0, ignore_eos=True), bytes(16)))
    while engine.has_work:
        outputs = engine.step().outputs
    print(type(outputs[-1]).__name__, outputs[-1].output_tokens, end=" ")
"""


def test_a_worker_which_has_no_compiler_loaded_serves_all_of_them(tmp_path: Path) -> None:
    """Workers import torch without it: what a model or its trial asks of it would fail there alone."""
    folders = [tmp_path / name for name in HYBRIDS]
    for folder in folders:
        write_folder(folder, folder.name)
    done = subprocess.run(
        [sys.executable, "-c", IN_A_WORKER, *map(str, folders)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "ChoiceFinished 4 " * len(folders), done.stderr


def test_a_worker_is_built_for_it_and_restores_from_the_host(tmp_path: Path) -> None:
    """As its settings say, without weights."""
    write_folder(tmp_path, "granite_hybrid")
    settings = WorkerSettings(
        model=str(tmp_path), load_format="dummy", threads=1, slots=4, state_every=1, states=9, blocks=32,
        host_bytes=2**20,
    )  # fmt: skip
    bundle = read_bundle(tmp_path, "m", load_format="dummy", dtype="float32", block_size=16)
    engine = build_engine(settings, tmp_path, bundle)
    engine.tiers.reuse.is_worth = lambda *_: True  # type: ignore[method-assign]
    engine.scheduler.pacer.times.prompt_seconds = lambda position, tokens: tokens * 0.1  # type: ignore[method-assign]
    prompt = tuple(range(1, 90))

    def run(name: str) -> tuple[list[int], dict[Tier, int]]:
        engine.add(SequenceSpec(name, 0, prompt, Sampling(6, temperature=0.0), ROOT))
        told, restored = list[int](), dict[Tier, int]()
        ended, deadline = False, time.monotonic() + LIMIT_S
        while not ended:
            assert time.monotonic() < deadline
            engine.maintain()
            for output in engine.step().outputs if engine.has_work else ():
                ended = ended or isinstance(output, ChoiceFinished)
                told += output.ids if isinstance(output, Tokens) else ()
                restored |= output.restored if isinstance(output, SequenceStarted) else {}
        while not engine.tiers.offloader.is_settled:
            engine.maintain()
        engine.check_integrity()
        return told, restored

    first, _ = run("first")
    assert engine.tiers.states is not None
    wait_until(lambda: engine.maintain() is None and engine.load().tiers["state"].offloaded_blocks_total >= 5)
    engine.pool.release(engine.pool.allocate(engine.pool.available))
    again, restored = run("again")
    engine.tiers.close()
    assert (again, restored) == (first, {Tier.HOST: 80})
