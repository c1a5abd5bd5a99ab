"""Small random models, an engine that notes all logits, and the comparison with a plain forward pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tiny_configs import CONFIGS, HYBRIDS
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.state_slots import StateSlots
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.assembly import trial_logits
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.fused.fuse import optimise
from kvfleet.worker.model.loader import adopt_model
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.port.outputs import SequenceStarted, StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.step_plan import Slice
from kvfleet.worker.text.detokenizer import Detokenizer
from kvproto.messages import ChoiceFinished, Sampling, Tokens
from kvsampling.draw import Drawn
from kvsampling.sampler import sample
from tests.support.id_detokenizer import IdDetokenizer

TOLERANCE = 1e-4
ROOT = b"tenant root 16 b"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model(name: str) -> Any:
    """A random fp32 model in evaluation mode; the same one each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config((CONFIGS | HYBRIDS)[name](), dtype=torch.float32).eval()
        for weight, values in model.named_parameters():
            if weight.endswith("sinks"):  # which a new model may have at zero
                values.data.normal_(1.0, 2.0)
        return model.to(DEVICE)


@torch.inference_mode()
def plain_logits(model: Any, ids: Sequence[int], positions: Sequence[int] | None = None) -> Tensor:
    """What transformers computes for `ids` in one forward pass, `[len, vocab]`; its sdpa knows no soft-capping and
    no sinks.

    `positions` are its own unless given; the tokens then still attend to one another in order.
    """
    ours = model.config._attn_implementation
    capped = getattr(model.config, "attn_logit_softcapping", None)
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    given = {} if positions is None else {"position_ids": torch.tensor([list(positions)], device=model.device)}
    logits: Tensor = model(torch.tensor([list(ids)], device=model.device), use_cache=False, **given).logits[0].cpu()
    model.set_attn_implementation(ours)
    return logits


class NotingRunner(TorchRunner):
    """Computes logits of every token it is fed, not only of those to draw, and notes them under what they follow.

    The key is the whole history as the engine claims it: (sequence's ids up to the token).
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noted: list[tuple[Slice, Tensor]] = []

    def run(self, slices: Sequence[Slice]) -> list[Drawn]:
        batch = RaggedBatch.of(slices, self.block_size)
        with torch.inference_mode(), self._mixing(batch) as states:
            logits = self.logits(batch, np.arange(len(batch.ids)))
            for first, part in zip(batch.first, slices, strict=True):
                self.noted.append((part, logits[first : first + len(part.ids)].cpu()))
            drawn = iter(sample(logits[torch.from_numpy(batch.rows)], batch.draws))
            if states is not None:
                states.commit()
        return [None if part.draw is None else next(drawn) for part in slices]


@dataclass
class Turn:
    """One request and what came of it."""

    prompt: list[int]
    sampling: Sampling
    outputs: list[int] = field(default_factory=list)
    cached: int = -1
    done: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.outputs


class Rig:
    """An engine over a copy of a model, its requests, and all logits it computed by (request, position).

    The `cpu` backend comes with all that makes a model fast on a CPU: packed linear layers and fused operations.
    """

    def __init__(
        self,
        model: Any,
        *,
        backend: AttentionBackend | None = None,
        blocks: int = 128,
        block_size: int = 16,
        budget: int = 512,
        slots: int = 64,
        quantized: bool = False,
        detokenizer: Detokenizer | None = None,
        states: int = 24,
        every: int = 2,
    ) -> None:
        self.model = model
        backend = backend or ReferenceBackend()
        loaded = adopt_model(copy.deepcopy(model))
        if quantized:
            loaded = replace(loaded, kv_shape=replace(loaded.kv_shape, quantized=True))
        if backend.name == "cpu":
            optimise(loaded.model, torch.get_num_threads(), lambda: trial_logits(loaded, block_size))
        self.runner = NotingRunner(loaded, backend, blocks, block_size, states)
        self.pool = BlockPool(blocks, block_size)
        self.slots = StateSlots(states, block_size, every) if self.runner.num_states else None
        self.scheduler = Scheduler(self.pool, token_budget=budget, slots=slots, states=self.slots)
        self.engine = Engine(self.runner, self.pool, self.scheduler, detokenizer or IdDetokenizer())
        self.turns: dict[str, Turn] = {}
        self.logits: dict[str, dict[int, Tensor]] = {}
        self.fed = 0

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> Turn:
        turn = Turn(list(prompt), Sampling(max_tokens, **({"temperature": 0.0} | sampling)))
        self.turns[name] = turn
        self.logits[name] = {}
        self.engine.add(SequenceSpec(name, 0, tuple(prompt), turn.sampling, ROOT))
        return turn

    def step(self) -> StepResult:
        tables = {id(s.blocks): s.spec.request for s in self.scheduler.running}
        result = self.engine.step()
        for sequence in self.scheduler.running:
            tables[id(sequence.blocks)] = sequence.spec.request
        self.engine.check_integrity()
        self.fed += result.fed_tokens
        for output in result.outputs:
            turn = self.turns[output.request]
            match output:
                case SequenceStarted():
                    turn.cached = output.cached_tokens
                case Tokens():
                    turn.outputs += output.ids
                case ChoiceFinished():
                    turn.done = True
                case _:
                    raise AssertionError(output)
        self._note(tables)
        return result

    def _note(self, tables: dict[int, str]) -> None:
        for part, logits in self.runner.noted:
            name = tables.get(id(part.blocks)) or self._finished_in_one_step(part)
            for at in range(len(part.ids)):
                self.logits[name][part.start + at] = logits[at]
        self.runner.noted.clear()

    def _finished_in_one_step(self, part: Slice) -> str:
        """Admitted and finished in the same step: known by its tokens."""
        return next(
            name
            for name, turn in self.turns.items()
            if turn.done and turn.ids[part.start : part.end] == list(part.ids) and part.end == len(turn.ids) - 1
        )

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def differences(self) -> dict[str, float]:
        """Per request the largest absolute difference of any logit it computed from a plain forward pass."""
        worst = {}
        for name, turn in self.turns.items():
            reference = plain_logits(self.model, turn.ids)
            noted = self.logits[name]
            assert set(noted) >= set(range(turn.cached, len(turn.ids) - 1)), "a token was neither cached nor computed"
            worst[name] = max((logits - reference[position]).abs().max().item() for position, logits in noted.items())
        return worst

    def check_greedy(self) -> int:
        """Greedy tokens are those of the plain forward pass unless its two best logits are closer than the tolerance.

        Returns how many such ties there were.
        """
        ties = 0
        for name, turn in self.turns.items():
            if turn.sampling.temperature > 0:
                continue
            reference = plain_logits(self.model, turn.ids)[len(turn.prompt) - 1 : -1]
            best = reference.topk(2, dim=-1)
            for at, token in enumerate(turn.outputs):
                if token != best.indices[at, 0]:
                    assert best.values[at, 0] - best.values[at, 1] < TOLERANCE, f"{name}: token {at} is {token}"
                    ties += 1
        return ties
