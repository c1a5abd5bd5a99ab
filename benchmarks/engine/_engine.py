"""Our engine as benchmarks drive it: built from a model folder as a worker builds it, stepped in this process.

Nothing of it runs between two calls, so a peer that is measured next to it has the machine to itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.harness.yardstick_machine import Machine
from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.assembly import KvDtype, build_runner, with_kv_dtype
from kvfleet.worker.model.loader import Device, Dtype, LoadFormat, load_model
from kvfleet.worker.port.outputs import SequenceFailed, SequenceStarted, StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.text.detokenizer import Detokenizer
from kvproto.messages import ChoiceFinished, Sampling, Tokens
from tests.support.id_detokenizer import IdDetokenizer

BLOCK = 16
ROOT = b"benchmark root16"
STEP_TOKENS = int(WorkerSettings.model_fields["step_tokens"].default)
NO_HURRY = 10.0
CORES = len(os.sched_getaffinity(0))


@dataclass(slots=True)
class Measured:
    """What became of prompts submitted at once, of any engine's; in seconds since submission."""

    seconds: float
    tokens: list[list[int]]
    ttft_s: list[float]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def decode_per_s(self) -> float:
        """Tokens per second of a single stream, after its first."""
        return (len(self.tokens[0]) - 1) / (self.seconds - self.ttft_s[0])


@dataclass(slots=True)
class Step:
    """One step of ours: when it ended, how long it took, what it fed."""

    ended: float
    seconds: float
    sequences: int
    prefill_tokens: int
    fed_tokens: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers that a step of a dense model multiplies with: of each token, and of those whose logits are wanted."""

    body: int
    head: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Any) -> Weights:
        head = model.get_output_embeddings().weight
        looked_up = {id(one.weight): one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding)}
        parameters = {id(one): one for one in model.parameters()}
        body = [one for key, one in parameters.items() if key not in looked_up and one is not head]
        return cls(sum(one.numel() for one in body), head.numel(), head.dtype)

    def bound_s(self, machine: Machine, steps: Iterable[Step], cached_bytes: int = 0) -> float:
        """Seconds that steps take at least: each reads all weights, and `cached_bytes` of K and V, and multiplies."""
        read = (self.body + self.head) * self.dtype.itemsize + cached_bytes
        return sum(
            machine.bound_s(read, 2 * (self.body * step.fed_tokens + self.head * step.sequences), self.dtype)
            for step in steps
        )


@dataclass(slots=True)
class OurRun(Measured):
    """`cached` is of each prompt."""

    cached: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def fed_tokens(self) -> int:
        return sum(step.fed_tokens for step in self.steps)


class Ours:
    """The engine on one model. `sequences`: how many at most run at once, each as long as `context` (0: the model's).

    The pool holds twice that, so that prefixes stay, or `blocks`. Steps are as large as a worker's by default.
    `itl_target_s` 0 is a worker's default, which paces prompts for the sake of running streams; with `NO_HURRY` prompts
    go first, as is right for a batch, and as the peers do it.
    """

    def __init__(
        self,
        folder: Path,
        dtype: Dtype = "auto",
        *,
        threads: int = CORES,
        sequences: int = 16,
        context: int = 0,
        kv_dtype: KvDtype = "auto",
        load_format: LoadFormat = "auto",
        token_budget: int = STEP_TOKENS,
        itl_target_s: float = 0.0,
        blocks: int | None = None,
        detokenizer: Detokenizer | None = None,
        device: Device = "cpu",
    ) -> None:
        disable_progress_bar()
        torch.set_num_threads(threads)
        loaded = load_model(folder, dtype=dtype, device=device, load_format=load_format)
        self.weights = Weights.of(loaded.model)
        loaded = with_kv_dtype(loaded, kv_dtype, BLOCK)
        blocks = blocks or 2 * sequences * -(-(context or loaded.context_length) // BLOCK)
        self.runner = build_runner(loaded, blocks, BLOCK)
        self.vocab_size = loaded.vocab_size
        pool = BlockPool(blocks, BLOCK)
        scheduler = Scheduler(pool, token_budget=token_budget, slots=sequences, itl_target_s=itl_target_s)
        self.engine = Engine(self.runner, pool, scheduler, detokenizer or IdDetokenizer())
        self.sampling = Sampling(1, temperature=0.0, ignore_eos=True)
        self._names = count()

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Submit one prompt, to be decoded past any end token; returns its name."""
        name = str(next(self._names))
        sampling = replace(self.sampling, max_tokens=max_tokens)
        self.engine.add(SequenceSpec(name, 0, tuple(prompt), sampling, ROOT))
        return name

    def step(self) -> StepResult:
        """One step of the engine; a sequence that fails ends the benchmark."""
        result = self.engine.step()
        for output in result.outputs:
            if isinstance(output, SequenceFailed):
                raise output.error
        return result

    def generate(self, prompts: list[list[int]], max_tokens: int) -> OurRun:
        """All prompts at once, exactly `max_tokens` of each, to the last token."""
        began = time.perf_counter()
        at = {self.add(prompt, max_tokens): index for index, prompt in enumerate(prompts)}
        run = OurRun(0.0, [[] for _ in prompts], [0.0] * len(prompts), [0] * len(prompts))
        left = len(prompts)
        while left:
            result = self.step()
            now = time.perf_counter() - began
            run.steps.append(Step(now, result.seconds, result.sequences, result.prefill_tokens, result.fed_tokens))
            for output in result.outputs:
                index = at[output.request]
                if isinstance(output, SequenceStarted):
                    run.cached[index] = output.cached_tokens
                elif isinstance(output, Tokens):
                    run.ttft_s[index] = run.ttft_s[index] or now
                    run.tokens[index] += output.ids
                elif isinstance(output, ChoiceFinished):
                    left -= 1
        run.seconds = run.steps[-1].ended
        assert all(len(tokens) == max_tokens for tokens in run.tokens)
        return run


def fresh_prompts(chance: Random, how_many: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random prompts, which nothing has cached."""
    return [[chance.randrange(vocab_size) for _ in range(length)] for _ in range(how_many)]
