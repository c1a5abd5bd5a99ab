"""An engine under test, whichever it is: what it was asked, what came of it, and how a new kind of engine joins.

test ──spec──▶ EngineRig ──submit──▶ EnginePort
  ◀──Stream──    │  ◀────take─────── results, in order, on the loop's thread
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvfleet.worker.port.engine_port import EnginePort
from kvfleet.worker.port.outputs import SequenceFailed, SequenceOutput, SequenceStarted, StepResult
from kvfleet.worker.port.sequence_spec import Key, SequenceSpec
from kvproto.block_hash import chain
from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, FinishReason, PromptScores, Sampling, TokenLogprobs, Tokens
from kvservice.event_log import EventLog
from tests.support.waiting import until

BLOCK_SIZE = 16
CONTEXT = 1024  # tokens
COARSE = 32  # tokens: no engine caches in larger blocks
TERMINAL = (ChoiceFinished, SequenceFailed)
WORDS = ("the cat", "sat down", "and told", "a story", "of rain", "one old", "boat", "by the sea", "under", "stars")


def greedy(max_tokens: int = 8, **fields: Any) -> Sampling:
    return Sampling(max_tokens, **{"temperature": 0.0, "ignore_eos": True, **fields})


def sampled(max_tokens: int = 8, seed: int | None = 7, **fields: Any) -> Sampling:
    return Sampling(max_tokens, **{"seed": seed, "ignore_eos": True, **fields})


def whole(tokens: int) -> int:
    """How many of so many computed tokens any engine finds again."""
    return tokens // COARSE * COARSE


@dataclass(frozen=True, slots=True)
class Stream:
    """What came of one sequence."""

    started: SequenceStarted | None
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...]
    scores: tuple[TokenLogprobs, ...]  # of the prompt
    end: ChoiceFinished | SequenceFailed | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reason(self) -> FinishReason:
        assert isinstance(self.end, ChoiceFinished), self.end
        return self.end.reason

    @property
    def error(self) -> KvfleetError:
        assert isinstance(self.end, SequenceFailed), self.end
        return self.end.error

    @property
    def cached_tokens(self) -> int:
        assert self.started is not None
        return self.started.cached_tokens

    @property
    def result(self) -> tuple[tuple[int, ...], str, FinishReason]:
        return self.ids, self.text, self.reason


def stream_of(spec: SequenceSpec, outputs: Iterable[SequenceOutput]) -> Stream:
    """Checks the grammar: started once and first, scores and tokens without a gap, nothing after the end."""
    started: SequenceStarted | None = None
    end: ChoiceFinished | SequenceFailed | None = None
    ids: list[int] = []
    pieces: list[str] = []
    logprobs: list[TokenLogprobs] = []
    scores: list[TokenLogprobs] = []
    for output in outputs:
        assert end is None, f"{output} after the end"
        match output:
            case SequenceStarted():
                assert started is None, "started twice"
                started = output
            case PromptScores():
                assert started is not None, "scores before the start"
                assert spec.scored is not None, "scores that are not asked for"
                assert output.index == max(spec.scored, 1) + len(scores), "a gap, or a score twice"
                assert not ids, "scores after tokens"
                scores += output.logprobs
            case Tokens():
                assert started is not None, "tokens before the start"
                assert output.index == len(spec.output_ids) + len(ids), "a gap, or a token twice"
                assert len(output.ids) == len(output.text) > 0
                assert len(output.logprobs) == (0 if spec.sampling.logprobs is None else len(output.ids))
                ids += output.ids
                pieces += output.text
                logprobs += output.logprobs
            case ChoiceFinished():
                assert started is not None, "finished before the start"
                assert output.output_tokens == len(spec.output_ids) + len(ids)
                end = output
            case SequenceFailed():
                end = output
    return Stream(started, tuple(ids), tuple(pieces), tuple(logprobs), tuple(scores), end)


def seam(stream: Stream) -> tuple[int, str]:
    """A string of which the first `count` tokens have the beginning and the next one has the end, and how many they
    are. It is nowhere before."""
    for count in range(3, len(stream.ids)):
        end = len("".join(stream.pieces[:count]))
        stop = stream.text[end - 1 : end + 1]
        if stream.pieces[count - 1] and stream.pieces[count] and stream.text.find(stop) == end - 1:
            return count, stop
    raise AssertionError(f"all tokens of {stream.pieces} meet as earlier ones do")


class Recorder:
    """The worker's loop in small: takes results and keeps them in order. `digests` are those that events led to."""

    def __init__(self) -> None:
        self.outputs: dict[Key, list[SequenceOutput]] = defaultdict(list)
        self.order: list[SequenceOutput] = []
        self.events = EventLog("an epoch")
        self.digests = {0}
        self.fed_tokens = 0
        self._thread = threading.get_ident()
        self.strayed = False  # results came on another thread

    def take(self, results: Sequence[StepResult]) -> None:
        self.strayed |= threading.get_ident() != self._thread
        for result in results:
            self.fed_tokens += result.fed_tokens
            self.events.note(result.changes)
            for output in result.outputs:
                choice = 0 if isinstance(output, PromptScores) else output.choice
                self.outputs[output.request, output.attempt, choice].append(output)
                self.order.append(output)
        self.events.flush(0.0)
        self.digests.add(self.events.digest)


@dataclass(eq=False)
class EngineRig:
    """One engine that runs. `stop` ends it and returns when it is gone. `has_kv`: K and V can be read. The roots
    are the test's own, so nothing that another one computed is found."""

    engine: EnginePort
    recorder: Recorder
    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: tuple[int, ...]
    stop: Callable[[], Awaitable[None]]
    has_kv: bool = True
    block_size: int = BLOCK_SIZE
    root: bytes = field(default_factory=lambda: os.urandom(16))
    other_root: bytes = field(default_factory=lambda: os.urandom(16))
    submitted: dict[Key, SequenceSpec] = field(default_factory=dict)
    owed: Counter[Key] = field(default_factory=Counter)  # terminal outputs
    stopped: bool = False

    # ---------------------------------------------------------------- what is asked

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def prompt(self, length: int, number: int = 0) -> tuple[int, ...]:
        """Prompts of two numbers begin differently."""
        words = random.Random(number).choices(WORDS, k=length)
        return self.encode(f"{number}. " + " ".join(words))[:length]

    def spec(self, request: str, prompt: Sequence[int], sampling: Sampling, **fields: Any) -> SequenceSpec:
        return SequenceSpec(
            request, prompt_ids=tuple(prompt), sampling=sampling, **{"attempt": 0, "root": self.root, **fields}
        )

    def submit(self, *specs: SequenceSpec) -> None:
        for spec in specs:
            self.submitted.setdefault(key_of(spec), spec)
            self.owed[key_of(spec)] += 1
            self.engine.submit(spec)

    async def run(self, spec: SequenceSpec) -> Stream:
        return (await self.run_all(spec))[0]

    async def run_all(self, *specs: SequenceSpec) -> list[Stream]:
        """Beside each other."""
        self.submit(*specs)
        await self.until(*map(key_of, specs))
        return [self.stream(key_of(spec)) for spec in specs]

    async def let_go(self, *specs: SequenceSpec, keep: bool = False) -> None:
        for spec in specs:
            del self.owed[key_of(spec)]
        await self.engine.let_go([key_of(spec)[:2] for spec in specs], keep=keep)

    # ---------------------------------------------------------------- what came

    def stream(self, key: Key) -> Stream:
        return stream_of(self.submitted[key], self.recorder.outputs[key])

    def ends(self, key: Key) -> list[SequenceOutput]:
        return [output for output in self.recorder.outputs[key] if isinstance(output, TERMINAL)]

    def begun(self) -> list[str]:
        """Requests in the order in which they were started."""
        return [output.request for output in self.recorder.order if isinstance(output, SequenceStarted)]

    async def until(self, *keys: Key) -> None:
        """All of what was submitted under them has ended."""
        await until(
            lambda: all(len(self.ends(key)) >= self.owed[key] for key in keys),
            told=lambda: f"{[key for key in keys if not self.ends(key)]} have not ended",
            pause_s=0.001,
        )

    async def until_tokens(self, spec: SequenceSpec, count: int = 1) -> None:
        key = key_of(spec)
        await until(lambda: len(self.stream(key).ids) >= count, told=f"{count} tokens of {key}", pause_s=0.001)

    async def until_idle(self) -> None:
        await until(lambda: self.engine.measured[0].running == self.engine.measured[0].waiting == 0)

    async def obeyed(self) -> None:
        """The engine has done all that it was told so far."""
        await self.engine.inspect(self.root, (0,))

    def held_chain(self, held: Iterable[bytes], ids: Sequence[int]) -> int:
        """How many leading blocks of `ids` are among them; checks that none is after a hole."""
        found = [block in frozenset(held) for block in chain(self.root, ids, self.block_size)]
        assert found == sorted(found, reverse=True), "a block without the one before it"
        return sum(found)

    async def close(self) -> None:
        """Stops the engine; all that was submitted and not let go has ended exactly once then."""
        if not self.stopped:
            self.stopped = True
            await self.stop()
        await self.until(*self.owed)
        assert not self.recorder.strayed
        assert {key: len(self.ends(key)) for key in self.owed} == self.owed


def key_of(spec: SequenceSpec) -> Key:
    return spec.request, spec.attempt, spec.choice


@dataclass(frozen=True, slots=True)
class RigKind:
    """A kind of engine. `start` takes a model folder, whose context is CONTEXT, and how many sequences may run at once;
    it may skip. `lacks`: by a test's name, why this kind of engine cannot pass it."""

    start: Callable[[Path, int], Awaitable[EngineRig]]
    lacks: Mapping[str, str] = field(default_factory=dict)
