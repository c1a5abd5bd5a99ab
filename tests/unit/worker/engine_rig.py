"""An engine on the fake runner, and what it should generate, for the tests of this folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import HealthCheck, settings

from kvproto.errors import KvfleetError
from kvproto.messages import FinishReason, Sampling
from services.worker.block_pool import BlockPool
from services.worker.detokenizer import Detokenizer, IdDetokenizer
from services.worker.engine import Engine
from services.worker.model.fake import FakeRunner
from services.worker.outputs import SequenceFailed, SequenceFinished, SequenceStarted, SequenceTokens, StepResult
from services.worker.scheduler import Scheduler
from services.worker.sequence import SequenceSpec
from services.worker.step_plan import Draw, Slice

ROOT = b"tenant root 16 b"
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other processes share the cores


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def spec(request: str, prompt: Sequence[int], max_tokens: int = 8, **fields: object) -> SequenceSpec:
    """Greedy unless `sampling` says otherwise."""
    sampling = fields.pop("sampling", None) or Sampling(max_tokens, temperature=0.0)
    return SequenceSpec(request, fields.pop("attempt", 0), tuple(prompt), sampling, ROOT, **fields)  # type: ignore[arg-type]


def make_engine(
    *,
    blocks: int = 64,
    block_size: int = 4,
    token_budget: int = 16,
    slots: int = 8,
    detokenizer: Detokenizer | None = None,
    runner: FakeRunner | None = None,
    clock: Clock | None = None,
    **fake: object,
) -> Engine:
    runner = runner or FakeRunner(
        num_blocks=blocks, block_size=block_size, **({"vocab_size": 1000, "context_length": 512} | fake)
    )  # type: ignore[arg-type]
    pool = BlockPool(runner.num_blocks, runner.block_size)
    scheduler = Scheduler(pool, token_budget=token_budget, slots=slots)
    return Engine(runner, pool, scheduler, detokenizer or IdDetokenizer(), clock or Clock())


def expected_tokens(prompt: Sequence[int], sampling: Sampling, vocab_size: int = 1000, choice: int = 0) -> list[int]:
    """What the fake runner generates for a prompt: computed alone, all tokens at once each time."""
    ids = list(prompt)
    runner = FakeRunner(num_blocks=256, block_size=8, vocab_size=vocab_size)
    for index in range(sampling.max_tokens):
        (token,) = runner.run([Slice(ids, 0, range(256), Draw(sampling, choice, index))])
        assert isinstance(token, int)
        ids.append(token)
    return ids[len(prompt) :]


class Transcript:
    """Collects outputs and checks their grammar: started once, tokens in order, one terminal."""

    def __init__(self) -> None:
        self.started: dict[tuple[str, int], SequenceStarted] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.text: dict[tuple[str, int], str] = defaultdict(str)
        self.ends: dict[tuple[str, int], FinishReason | KvfleetError] = {}
        self.finished: dict[tuple[str, int], SequenceFinished] = {}
        self.fed = 0
        self.first_index: dict[tuple[str, int], int] = {}

    def take(self, result: StepResult) -> None:
        self.fed += result.fed_tokens
        for output in result.outputs:
            key = (output.request, output.attempt)
            assert key not in self.ends, "output after the terminal one"
            match output:
                case SequenceStarted():
                    assert key not in self.started
                    self.started[key] = output
                case SequenceTokens():
                    assert key in self.started
                    assert len(output.ids) == len(output.text) > 0
                    first = self.first_index.setdefault(key, output.index)
                    assert output.index == first + len(self.tokens[key]), "a gap, or a token twice"
                    self.tokens[key] += output.ids
                    self.text[key] += "".join(output.text)
                case SequenceFinished():
                    assert key in self.started
                    self.ends[key] = output.reason
                    self.finished[key] = output
                case SequenceFailed():
                    self.ends[key] = output.error

    def run(self, engine: Engine, steps: int = 10_000) -> Transcript:
        """Step until there is nothing to do, checking the books each time."""
        for _ in range(steps):
            if not engine.has_work:
                return self
            self.take(engine.step())
            engine.check_integrity()
        raise AssertionError(f"still busy after {steps} steps")
