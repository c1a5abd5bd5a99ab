"""Recorded decode steps draw what launched ones do. Without a GPU a recorded step is run again from the same inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteSWAConfig, LlamaConfig, Qwen2Config, YoutuConfig

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.assembly import record_decodes, with_kv_dtype
from kvfleet.worker.model.gpu import decode_graphs
from kvfleet.worker.model.gpu.decode_graphs import Record, Replay, cuda_graphs, sizes_up_to
from kvfleet.worker.model.loader import LoadedModel, adopt_model
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.step_plan import Slice
from kvgpu.attention.backend import TritonBackend
from kvgpu.attention.plan import SHORTEST_PART
from kvproto.messages import Sampling, Tokens
from kvsampling.draw import Draw
from tests.support.id_detokenizer import IdDetokenizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, BLOCKS, MOST = 16, 96, 6
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 211, "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2-tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "gemma2-windows": Gemma2Config(**SHAPE, sliding_window=40, query_pre_attn_scalar=16),
    "youtu-latents": YoutuConfig(
        **SHAPE | {"num_key_value_heads": 4, "head_dim": 8},
        q_lora_rank=24,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=20,
    ),
    "granite-sinks": GraniteSWAConfig(**SHAPE, sliding_window=40, attention_multiplier=0.25, tie_word_embeddings=False),
}


@pytest.fixture(autouse=True)
def _memory_is_dirty() -> Iterator[None]:
    """Memory that nobody has written is NaN: none of it may reach a token, or a block."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def again(run: Callable[[], None]) -> Replay:
    return run


def record() -> Record:
    return cuda_graphs(DEVICE) if DEVICE.type == "cuda" else again


def load(name: str, kv_dtype: str = "auto") -> LoadedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).to(DEVICE)
    return with_kv_dtype(adopt_model(model), kv_dtype, SIZE)  # type: ignore[arg-type]


def runner_of(loaded: LoadedModel, recording: Record | None = None, most: int = MOST) -> TorchRunner:
    runner = TorchRunner(loaded, TritonBackend(DEVICE), BLOCKS, SIZE)
    if recording is not None:
        record_decodes(runner, loaded, runner._backend, most, recording)
    return runner


def filled(runner: TorchRunner) -> TorchRunner:
    """As if its blocks were computed: the same for every runner of a model."""
    chance = torch.Generator().manual_seed(3)
    shape = runner.pool.shape
    rows = torch.randn(BLOCKS * shape.layers * shape.parts * shape.kv_heads * SIZE, shape.head_dim, generator=chance)
    runner.pool.store(torch.arange(len(rows), device=DEVICE), rows.to(DEVICE))
    return runner


def slices(parts: Sequence[tuple[int, int]]) -> list[Slice]:
    """Of (start, tokens), in blocks in no order."""
    chance = random.Random(5)
    blocks = chance.sample(range(BLOCKS), BLOCKS)
    made = []
    for at, (start, tokens) in enumerate(parts):
        mine = [blocks.pop() for _ in range(-(-(start + tokens) // SIZE))]
        draw = Draw(Sampling(1, seed=at, temperature=at % 2 * 0.8, logprobs=2), 0, start)
        made.append(Slice([chance.randrange(211) for _ in range(tokens)], start, mine, draw))
    return made


@pytest.mark.parametrize(("name", "kv_dtype"), [*((name, "auto") for name in CONFIGS), ("llama", "int8")])
def test_a_replayed_step_is_the_launched_one(name: str, kv_dtype: str) -> None:
    """Sizes that are filled up too; long sequences are cut along their keys."""
    loaded = load(name, kv_dtype)
    launched, replaying = filled(runner_of(loaded)), filled(runner_of(loaded, record()))
    assert replaying.graphs is not None
    for parts in ([(0, 1)], [(5, 1), (SHORTEST_PART + 70, 1), (16, 1)], [(31, 1), (15, 1), (40, 1), (1, 1), (99, 1)]):
        step, before = slices(parts), replaying.graphs.replayed
        wanted, found = launched.run(step), replaying.run(step)
        assert replaying.graphs.replayed == before + 1
        for one, other in zip(wanted, found, strict=True):
            assert one.token == other.token  # type: ignore[union-attr]
            assert one.logprobs.top_logprobs == pytest.approx(other.logprobs.top_logprobs, abs=1e-4)  # type: ignore[union-attr]
        held, holds = launched.pool.data, replaying.pool.data
        if kv_dtype == "auto":
            assert torch.allclose(held, holds, atol=1e-5), "what fills up a step stores nothing"
        else:  # rounding may part two levels, and their scales
            runs = 2 * len(parts) * held.shape[1] * held.shape[3]
            assert int((held != holds).any(dim=-1).sum()) <= runs


def test_what_is_not_recorded_is_launched() -> None:
    loaded = load("llama")
    launched, replaying = filled(runner_of(loaded)), filled(runner_of(loaded, record()))
    assert replaying.graphs is not None
    before = replaying.graphs.replayed
    for parts in ([(0, 7)], [(20, 1), (0, 5)], [(at, 1) for at in range(MOST + 1)]):
        step = slices(parts)
        assert [one.token for one in launched.run(step)] == [one.token for one in replaying.run(step)]  # type: ignore[union-attr]
    more_follows = slices([(20, 1)])[0]
    more_follows.draw = None
    assert replaying.run([more_follows]) == [None]
    assert replaying.graphs.replayed == before


def recorded(recording: Record) -> list[int]:
    runner = filled(runner_of(load("llama"), recording))
    assert runner.graphs is not None
    found = []
    for sequences in (1, 3, 5):
        before = runner.graphs.replayed
        runner.run(slices([(3, 1)] * sequences))
        found += [sequences] * (runner.graphs.replayed - before)
    return found


def test_what_cannot_be_recorded_or_computes_something_else_is_left_out() -> None:
    sizes = sizes_up_to(MOST)
    assert sizes == [1, 2, 4, 6]
    left = iter(range(len(sizes)))

    def fails_at_second(run: Callable[[], None]) -> Replay:
        if next(left) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run

    assert recorded(record()) == [1, 3, 5]
    assert recorded(fails_at_second) == [1, 3, 5], "the largest one is there"
    assert recorded(lambda run: lambda: None) == []


def test_recording_takes_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "RECORDING_LIMIT_S", -1.0)
    assert recorded(record()) == []


@pytest.mark.parametrize("most", [0, 1, 3, 5, 64, 256, 257])
def test_sizes_reach_the_most_and_are_few(most: int) -> None:
    sizes = sizes_up_to(most)
    assert sizes == sorted(set(sizes))
    assert (sizes[-1] == most and sizes[0] == 1) if most else not sizes
    assert len(sizes) <= 20
    assert all(later - one <= max(4, one // 2, 8) for one, later in pairwise(sizes))


def test_an_engine_generates_the_same_with_and_without() -> None:
    """Arrivals, ends and prompts in between, while the text of a step is made in the next one."""
    loaded, told = load("llama"), []
    for recording in (None, record()):
        runner = runner_of(loaded, recording)
        runner.overlaps = recording is not None
        pool = BlockPool(BLOCKS, SIZE)
        told.append(run(Engine(runner, pool, Scheduler(pool), IdDetokenizer())))
        assert runner.graphs is None or runner.graphs.replayed > 20
    assert told[0] == told[1]


def run(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    chance = random.Random(2)
    for at in count():
        if at > 24 and not engine.has_work:
            return tokens
        if at % 4 == 0 and at <= 24:
            prompt = tuple(chance.randrange(211) for _ in range(chance.randrange(1, 40)))
            sampling = Sampling(chance.randrange(1, 14), seed=at, temperature=0.7)
            engine.add(SequenceSpec(f"r{at}", 0, prompt, sampling, b"tenant root 16 b"))
        for output in engine.step().outputs:
            if isinstance(output, Tokens):
                tokens.setdefault(output.request, []).extend(output.ids)
    raise AssertionError
