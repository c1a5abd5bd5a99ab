"""Two processes compute what one does, with the same blocks' bytes, and none of them outlives the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tiny_configs import CONFIGS, VOCAB
from tiny_models import ROOT, TOLERANCE
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.engine.engine_factory import build_engine
from kvfleet.worker.model.assembly import build_runner, with_kv_dtype
from kvfleet.worker.model.base import Abort, StepAborted
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.loader import load_model
from kvfleet.worker.model.parallel.launch import start_group
from kvfleet.worker.model.parallel.messages import RankPlan
from kvfleet.worker.model.parallel.runner import GroupRunner
from kvfleet.worker.model.parallel.sharding import RankPart
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.port.outputs import SequenceStarted
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.step_plan import Scoring, Slice
from kvfleet.worker.settings import WorkerSettings
from kvproto.dataplane.block import kv_format
from kvproto.errors import EngineFailure, InvalidRequest, UnsupportedModel
from kvproto.messages import Sampling, Tier, Tokens
from kvsampling.draw import Draw, ScoredPrompt
from tests.support.tiny_llama import write_tiny_llama
from tests.support.waiting import wait_until

SIZE = 16
PROMPT = [(7 * at) % VOCAB for at in range(40)]
OTHER = [(11 * at) % VOCAB for at in range(21)]
GREEDY = Sampling(8, temperature=0.0)
Start = Callable[..., GroupRunner]


@pytest.fixture
def start() -> Iterator[Start]:
    groups: list[GroupRunner] = []

    def started(folder: Path, limit_s: float = 60.0, **plan: Any) -> GroupRunner:
        told: dict[str, Any] = {"ranks": 2, "device": "cpu", "blocks": 32} | plan
        groups.append(start_group(RankPlan(folder=folder, **told), limit_s))
        return groups[-1]

    yield started
    for runner in groups:
        runner.group.close()
        assert all(follower.process.returncode is not None for follower in runner.group.followers)


def uneven() -> Any:
    """The last rank has less of its layers; biases of sums must be added once."""
    biases = {"attention_bias": True, "mlp_bias": True}
    return hf.LlamaConfig(
        **CONFIGS["llama"]().to_diff_dict() | biases | {"intermediate_size": 97, "num_key_value_heads": 2}
    )


def written(folder: Path, config: Any) -> Path:
    """Biases and sinks are no longer what a new model's are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                weight.data.normal_(0, 0.3)
        model.save_pretrained(folder)
    return folder


def both(start: Start, folder: Path) -> tuple[GroupRunner, TorchRunner]:
    """The same model on two processes and on one."""
    written(folder, uneven())
    return start(folder), build_runner(load_model(folder, device="cpu"), 32, SIZE, "reference")


def slices(*parts: tuple[list[int], int, range]) -> list[Slice]:
    return [Slice(ids, start, blocks, Draw(GREEDY, 0, 0)) for ids, start, blocks in parts]


def steps() -> Iterator[list[Slice]]:
    """Two prompts, one of them in chunks, then decodes."""
    yield slices((PROMPT[:23], 0, range(3)))
    yield slices((PROMPT[23:], 23, range(3)), (OTHER, 0, range(8, 10)))
    yield slices(([3], 40, range(3)), ([4], 21, range(8, 10)))


@torch.inference_mode()
def logits(runner: TorchRunner, parts: list[Slice]) -> Tensor:
    batch = RaggedBatch.of(parts, SIZE)
    return runner.logits(batch, np.arange(len(batch.ids)))


def scores(runner: TorchRunner) -> list[float]:
    """Of a prompt's tokens, in pieces."""
    (ran,) = runner.run([Slice(PROMPT, 0, range(16, 19), None, Scoring(1, PROMPT[1:], 0))])
    assert isinstance(ran, ScoredPrompt)
    return [one.logprob for one in ran.logprobs]


@pytest.mark.parametrize(
    ("config", "how", "tolerance"),
    [
        (uneven, {"attention": "cpu"}, TOLERANCE),
        (CONFIGS["qwen2"], {"load_format": "dummy", "attention": "reference"}, TOLERANCE),  # with tied embeddings
        (CONFIGS["qwen3-moe"], {"attention": "triton"}, TOLERANCE),
        (CONFIGS["granite-swa"], {"attention": "cpu"}, TOLERANCE),
        (CONFIGS["llama-biases"], {"attention": "cpu", "kv_dtype": "int8"}, 0.1),  # a last bit may be another
    ],
    ids=["uneven", "tied-dummy", "experts", "sinks", "int8"],
)
def test_two_processes_compute_what_one_does(
    config: Callable[[], Any],
    how: dict[str, Any],
    tolerance: float,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvfleet.worker.model.runner.SCORED_BYTES", 4 * VOCAB * 10)
    folder = written(tmp_path, config())
    group = start(folder, **how)
    loaded = load_model(folder, load_format=how.get("load_format", "auto"), device="cpu")
    alone = build_runner(with_kv_dtype(loaded, how.get("kv_dtype", "auto"), SIZE), 32, SIZE, "reference")
    for parts in steps():
        assert torch.allclose(logits(group, parts), logits(alone, parts), rtol=0, atol=tolerance)
    assert scores(group) == pytest.approx(scores(alone), abs=tolerance)
    for runner in (group, alone):
        runner.copy_blocks([(16, 20), (17, 16)])
    for block, other in ((0, 1), (16, 20), (16, 17)):
        assert group.difference(block, other) == pytest.approx(alone.difference(block, other), abs=tolerance)
    for ours, theirs in zip(group.read_kv([0, 1], 20, 1), alone.read_kv([0, 1], 20, 1), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=tolerance)
    assert group.run(slices(([5], 41, range(3)))) == alone.run(slices(([5], 41, range(3))))


def test_a_block_is_the_ranks_parts_and_says_so(start: Start, tmp_path: Path) -> None:
    group, alone = both(start, tmp_path)
    for runner in (group, alone):
        runner.run(slices((PROMPT, 0, range(3))))
    memory, size = group.memory, group.memory.block_bytes
    assert (size, memory.rows, group.bytes_per_block) == (alone.memory.block_bytes, alone.memory.rows, size)
    formats = {kv_format(2, 2, 16, SIZE, "float32", ranks) for ranks in (1, 2, 4)}
    assert len(formats) == 3
    assert {kv_format(2, 2, 16, SIZE, "float32"), alone.memory.kv_format} == {alone.memory.kv_format}
    assert memory.kv_format == kv_format(2, 2, 16, SIZE, "float32", 2)
    for target in (memory.host_memory(3 * size)[size : 2 * size], memoryview(bytearray(size))):
        memory.read(1, target)
        parts = torch.frombuffer(target, dtype=torch.float32).view(2, 2, 2, 1, SIZE, 16)  # rank, layer, K or V, head
        assert torch.allclose(parts.transpose(0, 3)[0], alone.pool.data[1].view(2, 2, 2, SIZE, 16), atol=TOLERANCE)
        memory.write(9, target)
        assert group.difference(1, 9) == 0.0 < group.difference(0, 9)
        group.copy_blocks([(0, 9)])


class Hasty(Abort):
    """A cancel that comes at the `at`-th look, from 0."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.looks, self.at = 0, at

    def check(self) -> None:
        self.looks += 1
        if self.looks > self.at:
            raise StepAborted


def test_a_cancel_is_heard_before_ranks_begin_and_not_between_layers(start: Start, tmp_path: Path) -> None:
    group, alone = both(start, tmp_path)
    group.abort = Hasty(0)
    with pytest.raises(StepAborted):
        group.run(slices((PROMPT, 0, range(3))))
    group.abort = hasty = Hasty(3)
    for parts in steps():
        assert torch.allclose(logits(group, parts), logits(alone, parts), rtol=0, atol=TOLERANCE)
    assert hasty.looks == 3  # one for each pass


def conversation(engine: Engine) -> tuple[dict[str, list[int]], set[str]]:
    """Greedy tokens of requests that share prefixes, more than the device holds; and what happened on the way."""
    prompts = [[(at * 37 + part * 101) % 900 + 3 for at in range(70 + part)] for part in range(4)]
    engine.tiers.reuse.is_worth = lambda root, offload_s, recompute_s: True  # type: ignore[method-assign]
    engine.scheduler.pacer.times.prompt_seconds = lambda position, tokens: tokens * 0.1  # type: ignore[method-assign]
    found: dict[str, list[int]] = {}
    events: set[str] = set()
    for turn, names in enumerate((["0", "1", "2", "3"], ["0", "0", "3"], ["1", "2"])):
        for number, name in enumerate(names):
            key = f"{turn}/{number}"
            found[key] = []
            prompt = (*prompts[int(name)], *range(5, 5 + turn))
            engine.add(SequenceSpec(key, 0, prompt, Sampling(48, temperature=0.0), ROOT))
        while engine.has_work or engine.tiers.restorer.waiting:
            engine.maintain()
            for output in engine.step().outputs if engine.has_work else ():
                if isinstance(output, SequenceStarted):
                    events |= {"cached"} if output.cached_tokens else set()
                    events |= {"restored"} if output.restored.get(Tier.HOST) else set()
                elif isinstance(output, Tokens):
                    found[output.request] += output.ids
            engine.check_integrity()
            time.sleep(0.0005)
        while engine.tiers.offloader.has_work or engine.tiers.offloader.held_on_host():
            engine.maintain()
            time.sleep(0.0005)
    events |= {"preempted"} if engine.scheduler.preemptions else set()
    return found, events


def test_the_engine_serves_the_same_tokens(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    bundle = read_bundle(folder, "tiny", load_format="auto", dtype="auto", block_size=SIZE)

    def served(ranks: int) -> tuple[dict[str, list[int]], set[str]]:
        settings = WorkerSettings(
            model=str(folder), device="cpu", blocks=16, host_bytes=8 << 20, tensor_parallel_size=ranks, threads=1
        )
        engine = build_engine(settings, folder, bundle)
        try:
            return conversation(engine)
        finally:
            engine.tiers.close()
            if isinstance(engine.runner, GroupRunner):
                engine.runner.group.close()

    expected, _ = served(1)
    assert served(2) == (expected, {"cached", "restored", "preempted"})
    assert all(len(ids) > 30 for ids in expected.values())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_step_fails_when_a_rank_ends_or_hangs(end: signal.Signals, start: Start, tmp_path: Path) -> None:
    runner = start(written(tmp_path, uneven()), limit_s=4.0)
    runner.run(slices((PROMPT, 0, range(3))))
    (follower,) = runner.group.followers
    began = time.monotonic()
    follower.process.send_signal(end)
    with pytest.raises(EngineFailure, match=r"rank 1 of 2 ended|took longer|a group of 2"):
        runner.run(slices((OTHER, 0, range(8, 10))))
    assert time.monotonic() - began < 20
    with pytest.raises(EngineFailure):
        runner.run(slices((OTHER, 0, range(8, 10))))
    with pytest.raises(EngineFailure):
        runner.memory.read(0, memoryview(bytearray(runner.memory.block_bytes)))
    assert follower.process.wait(20) == -signal.SIGKILL


LEADER = """
import sys
from pathlib import Path
from kvfleet.worker.model.parallel.launch import start_group
from kvfleet.worker.model.parallel.messages import RankPlan
from kvfleet.worker.schedule.step_plan import Slice

runner = start_group(RankPlan(2, Path(sys.argv[1]), device="cpu", blocks=8))
print(runner.group.followers[0].process.pid, flush=True)
while True:
    runner.run([Slice(list(range(1, 60)), 0, range(4), None)])
"""


def test_no_rank_outlives_its_leader(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEADER, str(written(tmp_path, uneven()))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as leader:
        assert leader.stdout is not None
        follower = int(leader.stdout.readline())
        leader.kill()
    wait_until(lambda: not Path(f"/proc/{follower}").exists() or "Z (" in Path(f"/proc/{follower}/status").read_text())


@pytest.mark.parametrize(
    ("name", "ranks", "why"),
    [
        ("gpt2", 2, "tensor parallelism without a plan"),
        ("mistral", 2, "cutting 1 heads of keys and values into 2"),
        ("llama-biases", 4, "cutting 2 heads of keys and values into 4"),
        ("phi3", 2, "a tensor-parallel plan that leaves attention whole"),
        ("flint", 2, "a tensor-parallel plan that leaves attention whole"),
        ("deepseek-v2", 2, "tensor parallelism of latent attention"),
        ("gpt-oss", 2, "a tensor-parallel plan that leaves attention whole"),
        ("cohere", 2, "its tensor-parallel plan over 2 processes"),
    ],
)
def test_what_cannot_be_cut_is_refused(name: str, ranks: int, why: str, start: Start, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        start(written(tmp_path, CONFIGS[name]()), ranks=ranks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_more_ranks_than_cards_are_refused(start: Start, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cards are asked for"):
        start(written(tmp_path, CONFIGS["llama"]()), device="cuda", ranks=64)


def test_spans_cover_a_size_once() -> None:
    for size, ranks in ((96, 4), (97, 4), (5, 4), (211, 2)):
        spans = [RankPart(rank, ranks).span(size) for rank in range(ranks)]
        assert [at for begin, length in spans for at in range(begin, begin + length)] == list(range(size))
