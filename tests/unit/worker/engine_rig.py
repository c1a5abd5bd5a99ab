"""An engine on the fake runner, and what it should generate, for the tests of this folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import HealthCheck, settings

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.state_slots import StateSlots
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.fake import FakeRunner, _value
from kvfleet.worker.port.outputs import SequenceFailed, SequenceStarted, StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.step_plan import Slice
from kvfleet.worker.text.detokenizer import Detokenizer
from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, FinishReason, Overflow, Sampling, TokenLogprobs, Tokens
from kvsampling.beam_search import BeamSearch, Hypothesis
from kvsampling.draw import Candidates, Draw
from tests.support.id_detokenizer import IdDetokenizer

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


class WindowedRunner(FakeRunner):
    """Sees the last `window` tokens only and reads no block before them. Slots hold one token's value each."""

    def __init__(self, *, window: int, **fake: object) -> None:
        super().__init__(**fake)  # type: ignore[arg-type]
        self.window = window

    def _store(self, part: Slice) -> None:
        for position, token in enumerate(part.ids, part.start):
            self.slots[self._slot(part, position)] = _value(token, position)

    def _token(self, part: Slice, draw: Draw) -> int:
        assert self.window is not None
        seen = sum(self.slots[self._slot(part, at)] for at in range(max(0, part.end - self.window), part.end))
        held = Slice((), self.block_size, range(1), None, state=part.state)  # the sum, as if it were one full block's
        self._totals[0], kept = seen, self._totals[0]
        token = super()._token(held, draw)
        self._totals[0] = kept
        return token

    def _slot(self, part: Slice, position: int) -> int:
        block = part.blocks[position // self.block_size]
        assert block >= 0, "a block within the window was let go"
        return block * self.block_size + position % self.block_size


def make_engine(
    *,
    blocks: int = 64,
    block_size: int = 4,
    token_budget: int = 16,
    slots: int = 8,
    detokenizer: Detokenizer | None = None,
    runner: FakeRunner | None = None,
    clock: Clock | None = None,
    every: int = 2,
    **fake: object,
) -> Engine:
    runner = runner or FakeRunner(
        num_blocks=blocks, block_size=block_size, **({"vocab_size": 1000, "context_length": 512} | fake)
    )  # type: ignore[arg-type]
    pool = BlockPool(runner.num_blocks, runner.block_size)
    states = StateSlots(runner.num_states, runner.block_size, every) if runner.num_states else None
    scheduler = Scheduler(pool, token_budget=token_budget, slots=slots, window=runner.window, states=states)
    return Engine(runner, pool, scheduler, detokenizer or IdDetokenizer(), clock or Clock())


def expected_tokens(
    prompt: Sequence[int],
    sampling: Sampling,
    vocab_size: int = 1000,
    choice: int = 0,
    *,
    context: int = 512,
    window: int | None = None,
    recurrent: bool = False,
) -> list[int]:
    """What the fake runner generates for a prompt: computed alone, all tokens at once each time."""
    seen, outputs, most = list(prompt), [], sampling.max_tokens
    if sampling.overflow is Overflow.TRUNCATE_LEFT:
        seen = seen[max(0, len(seen) + most - context) :]
    if sampling.overflow is Overflow.TRUNCATE_GENERATION:
        most = min(most, context - len(seen))
    shape = {"num_blocks": 256, "block_size": 8, "vocab_size": vocab_size, "num_states": int(recurrent)}
    runner = WindowedRunner(window=window, **shape) if window else FakeRunner(**shape)  # type: ignore[arg-type]
    for index in range(most):
        while sampling.overflow is Overflow.SLIDING and len(seen) >= context:
            del seen[: context // 2]
        runner.copy_states([(-1, 0)] if recurrent else [])
        (token,) = runner.run([Slice(seen, 0, range(256), Draw(sampling, choice, index), state=recurrent - 1)])
        assert isinstance(token, int)
        seen.append(token)
        outputs.append(token)
    return outputs


def expected_beams(
    prompt: Sequence[int],
    sampling: Sampling,
    vocab_size: int = 1000,
    *,
    stop_ids: Sequence[int] = (),
    window: int | None = None,
    recurrent: bool = False,
) -> list[Hypothesis]:
    """What a beam search finds on the fake runner: each beam computed alone, all tokens at once each time."""
    assert sampling.beams is not None
    shape = {"num_blocks": 256, "block_size": 8, "vocab_size": vocab_size, "num_states": int(recurrent)}
    runner = WindowedRunner(window=window, **shape) if window else FakeRunner(**shape)  # type: ignore[arg-type]
    search = BeamSearch(sampling.beams, sampling.max_tokens, frozenset(stop_ids))
    while not search.over:
        found = []
        for beam in search.running:
            outputs = [one.token for one in beam.path()]
            banned = tuple(stop_ids) if len(outputs) < sampling.min_tokens else ()
            draw = Draw(sampling, 0, len(outputs), banned=banned, candidates=search.candidates)
            runner.copy_states([(-1, 0)] if recurrent else [])
            (one,) = runner.run([Slice([*prompt, *outputs], 0, range(256), draw, state=recurrent - 1)])
            assert isinstance(one, Candidates)
            found.append(one)
        search.take(found)
    return search.finished


class Transcript:
    """Collects outputs and checks their grammar: started once, tokens in order, one terminal.

    Sequences are keyed (request, attempt), or (request, choice) where `by_choice`.
    """

    def __init__(self, *, by_choice: bool = False) -> None:
        self._by_choice = by_choice
        self.started: dict[tuple[str, int], SequenceStarted] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[str, int], list[TokenLogprobs]] = defaultdict(list)
        self.text: dict[tuple[str, int], str] = defaultdict(str)
        self.ends: dict[tuple[str, int], FinishReason | KvfleetError] = {}
        self.finished: dict[tuple[str, int], ChoiceFinished] = {}
        self.fed = 0
        self.first_index: dict[tuple[str, int], int] = {}

    def take(self, result: StepResult) -> None:
        self.fed += result.fed_tokens
        for output in result.outputs:
            key = (output.request, output.choice if self._by_choice else output.attempt)
            assert key not in self.ends, "output after the terminal one"
            match output:
                case SequenceStarted():
                    assert key not in self.started
                    self.started[key] = output
                case Tokens():
                    assert key in self.started
                    assert len(output.ids) == len(output.text) > 0
                    first = self.first_index.setdefault(key, output.index)
                    assert output.index == first + len(self.tokens[key]), "a gap, or a token twice"
                    assert len(output.logprobs) in (0, len(output.ids))
                    self.tokens[key] += output.ids
                    self.logprobs[key] += output.logprobs
                    self.text[key] += "".join(output.text)
                case ChoiceFinished():
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
