"""A runner without a model: deterministic, no torch, fast or paced. For tests and fleets by the hundred.

Every slot of its pool holds a value made from the token and its position, and the next token is made from the values in
the sequence's blocks. So a block that is lost, corrupted or written at the wrong position changes the output.

Greedy takes the favourite, which is made from the blocks; a random draw takes any token, each as likely. The log
probabilities say that the token r places after the favourite in the vocabulary (around its end) has a probability in
proportion to 1 / ((r + 1) (r + 2)), in prompts as well. Bans and biases count, penalties do not.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from kvcpu.vector.numbers import SCALE_BYTES
from kvfleet.worker.model.base import Abort, BlockMemory, StatePieces, StepAborted, host_memory
from kvfleet.worker.schedule.step_plan import Scoring, Slice
from kvproto.dataplane.block import kv_format, state_format
from kvproto.messages import TokenLogprobs
from kvsampling.draw import Candidates, Draw, Ran, Scored, ScoredPrompt

_MASK = 2**64 - 1
_TOKEN, _POSITION, _INDEX = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_LAYER_S = 0.02  # of a simulated step, after which it looks whether it is still wanted
SLOT_BYTES = 8
_VALUE_BITS = 20  # shift that leaves 44 bits: a sum over a million positions still fits 64


def _value(token: int, position: int) -> int:
    mixed = ((token + 1) * _TOKEN ^ (position + 1) * _POSITION) & _MASK
    mixed ^= mixed >> 29
    return (mixed * _POSITION & _MASK) >> _VALUE_BITS


class FakeMemory(BlockMemory):
    """See `BlockMemory`: the slots of a FakeRunner, as bytes."""

    def __init__(self, slots: array[int], totals: list[int], block_size: int) -> None:
        self.block_bytes = slots.itemsize * block_size
        self.kv_format = kv_format(1, 1, 1, block_size, "fake")
        self.rows: tuple[int, int, str] = (block_size, slots.itemsize - SCALE_BYTES, "int8")
        self._slots, self._totals, self._size = slots, totals, block_size
        self._bytes = memoryview(slots).cast("B")

    def host_memory(self, size: int) -> memoryview:
        return host_memory(size)

    def view(self, block: int) -> memoryview:
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def read(self, block: int, target: memoryview) -> None:
        target[:] = self.view(block)

    def write(self, block: int, source: memoryview) -> None:
        self.view(block)[:] = source

    def landed(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._totals[block] = self._slots[(block + 1) * self._size - 1]


class FakeStateMemory(StatePieces):
    """States of a FakeRunner, as bytes."""

    def __init__(self, states: array[int]) -> None:
        self.block_bytes = states.itemsize
        self.kv_format = state_format(bytes(16), [])
        self._bytes = memoryview(states).cast("B")

    def read(self, block: int, target: memoryview) -> None:
        target[:] = self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def write(self, block: int, source: memoryview) -> None:
        self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes] = source


@dataclass(frozen=True, slots=True)
class FakePace:
    """How fast a FakeRunner pretends to be; None: as fast as it goes."""

    tokens_per_s: float | None = None  # of decoding, all sequences of a step together
    prefill_tokens_per_s: float | None = None
    step_seconds: float = 0.0  # added to each step
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(eq=False, kw_only=True)
class FakeRunner:
    """Slots hold running sums within their block, so a block's last valid slot stands for the whole block."""

    num_blocks: int = 4096
    block_size: int = 16
    vocab_size: int = 32_000
    context_length: int = 32_768
    eos_ids: tuple[int, ...] = ()
    pace: FakePace = FakePace()
    abort: Abort = field(default_factory=Abort)
    device: str = "cpu"
    num_layers: int = 1
    num_states: int = 0  # a state is a sum over all of a sequence's tokens, of which the next token is made too
    window: int | None = None
    tolerance: float = 0.0
    overlaps: bool = False
    _due: float = 0.0

    def __post_init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None
        self.bytes_per_block = SLOT_BYTES * self.block_size
        self.slots = array("Q", bytes(self.bytes_per_block * self.num_blocks))
        self.states = array("Q", bytes(SLOT_BYTES * self.num_states))
        self.state_memory: StatePieces | None = FakeStateMemory(self.states) if self.num_states else None
        self._totals = [0] * self.num_blocks  # a full block's last slot, for sums without arithmetic per block
        self.memory: BlockMemory = FakeMemory(self.slots, self._totals, self.block_size)

    def run(self, slices: Sequence[Slice]) -> list[Ran]:
        if self.overlaps:
            self.meanwhile()
        self._wait(slices)
        ran: list[Ran] = []
        for part in slices:
            self._store(part)
            if part.state >= 0:
                self._move_on(part)
            drawn = None if part.draw is None else self._token(part, part.draw)
            ran.append(drawn if part.scoring is None else ScoredPrompt(self._scores(part, part.scoring), drawn))
        return ran

    def take_device_seconds(self) -> float | None:
        return None

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        size = self.block_size
        for source, target in copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
            self._totals[target] = self._totals[source]

    def read_kv(self, blocks: Sequence[int], tokens: int, layer: int) -> tuple[Any, Any]:
        """K is what the slots hold, V the negative of it, as int64 `[tokens, 1, 1]`."""
        import numpy as np  # the fake serves without numpy otherwise

        size = self.block_size
        held = [self.slots[blocks[at // size] * size + at % size] for at in range(tokens)]
        keys = np.array(held, dtype=np.int64).reshape(-1, 1, 1)
        return keys, -keys

    def difference(self, block: int, other: int) -> float:
        return float(self.memory.view(block) != self.memory.view(other))

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            self.states[target] = self.states[source] if source >= 0 else 0

    def _move_on(self, part: Slice) -> None:
        state, snapshots = self.states[part.state], dict(part.snapshots)
        for position, token in enumerate(part.ids, part.start):
            state = (state * _INDEX + _value(token, position)) & _MASK
            if (slot := snapshots.get(position + 1)) is not None:
                self.states[slot] = state
        self.states[part.state] = state

    def _store(self, part: Slice) -> None:
        size, slots = self.block_size, self.slots
        for position, token in enumerate(part.ids, part.start):
            offset = position % size
            block = part.blocks[position // size]
            slot = block * size + offset
            value = _value(token, position)
            slots[slot] = value + slots[slot - 1] if offset else value
            if offset == size - 1:
                self._totals[block] = slots[slot]

    def _seen(self, part: Slice, end: int) -> int:
        """Reads every block of the sequence up to `end`."""
        full, rest = divmod(end, self.block_size)
        seen = sum(map(self._totals.__getitem__, part.blocks[:full]))
        if rest:
            seen += self.slots[part.blocks[full] * self.block_size + rest - 1]
        return seen

    def _scores(self, part: Slice, scoring: Scoring) -> tuple[TokenLogprobs, ...]:
        scored = []
        for position, token in enumerate(scoring.ids, scoring.first):
            favourite = self._hashed(self._seen(part, position))
            logprobs = self._scored(token, favourite, scoring.alternatives).logprobs
            scored.append(replace(logprobs, rank=(token - favourite) % self.vocab_size + 1))
        return tuple(scored)

    def _token(self, part: Slice, draw: Draw) -> int | Scored | Candidates:
        """Hashes what was seen with what the draw depends on."""
        seen = self._seen(part, part.end)
        if part.state >= 0:
            seen ^= self.states[part.state]
        sampling = draw.sampling
        token = favourite = self._hashed(seen)
        if draw.candidates:
            return self._candidates(favourite, draw)
        if sampling.temperature > 0:
            token = self._hashed(seen ^ ((sampling.seed or 0) * _TOKEN + draw.choice * _POSITION + draw.index * _INDEX))
        if draw.matcher is not None:
            token = self._of_grammar(token, draw)
        elif draw.banned or sampling.logit_bias:
            token = self._allowed(token, draw)
        return token if sampling.logprobs is None else self._scored(token, favourite, sampling.logprobs)

    def _candidates(self, favourite: int, draw: Draw) -> Candidates:
        sampling, bias = draw.sampling, draw.sampling.logit_bias
        ranked = ((favourite + rank) % self.vocab_size for rank in range(self.vocab_size))
        plain = islice((one for one in ranked if one not in draw.banned and one not in bias), draw.candidates)
        tokens = [*plain, *(one for one in bias if one not in draw.banned)]
        scores = {one: self._logprob(one, favourite) + bias.get(one, 0.0) for one in tokens}
        best = tuple(sorted(tokens, key=lambda one: -scores[one])[: draw.candidates])
        found = Candidates(best, tuple(map(scores.__getitem__, best)))
        if sampling.logprobs is None:
            return found
        own = tuple(self._logprob(one, favourite) for one in best)
        return replace(found, logprobs=own, top=self._scored(favourite, favourite, sampling.logprobs).logprobs)

    def _hashed(self, seen: int) -> int:
        mixed = (seen & _MASK ^ (seen & _MASK) >> 31) * _TOKEN & _MASK
        return ((mixed ^ mixed >> 32) * _INDEX & _MASK) % self.vocab_size

    def _allowed(self, token: int, draw: Draw) -> int:
        """The best token when ranks are counted from `token`."""
        bias = draw.sampling.logit_bias
        plain = token
        while plain in draw.banned or plain in bias:
            plain = (plain + 1) % self.vocab_size
            if plain == token:
                break
        candidates = [plain, *(one for one in bias if one not in draw.banned)]
        return max(candidates, key=lambda one: self._logprob(one, token) + bias.get(one, 0.0))

    def _of_grammar(self, token: int, draw: Draw) -> int:
        """The one of those that it allows; each is as probable."""
        assert draw.matcher is not None
        allowed = draw.matcher.mask(draw.output_ids).nonzero()[0].tolist()
        chosen = [one for one in allowed if one not in draw.banned] or allowed
        return int(chosen[token % len(chosen)])

    def _scored(self, token: int, favourite: int, top: int) -> Scored:
        ranked = [(favourite + rank) % self.vocab_size for rank in range(min(top, self.vocab_size))]
        values = tuple(self._logprob(one, favourite) for one in ranked)
        return Scored(token, TokenLogprobs(self._logprob(token, favourite), tuple(ranked), values))

    def _logprob(self, token: int, favourite: int) -> float:
        rank = (token - favourite) % self.vocab_size
        return math.log((self.vocab_size + 1) / self.vocab_size) - math.log((rank + 1) * (rank + 2))

    def _wait(self, slices: Sequence[Slice]) -> None:
        """Sleep until the steps so far would be done at the given speed; time lost elsewhere is not caught up. Raises
        StepAborted as soon as the step is cancelled, without taking its time."""
        self.abort.check()
        fed = sum(len(part.ids) for part in slices)
        decodes = sum(1 for part in slices if len(part.ids) == 1)
        pace = self.pace
        seconds = pace.step_seconds
        seconds += decodes / pace.tokens_per_s if pace.tokens_per_s else 0.0
        seconds += (fed - decodes) / pace.prefill_tokens_per_s if pace.prefill_tokens_per_s else 0.0
        if seconds <= 0:
            return
        now = pace.clock()
        self._due = max(self._due, now) + seconds
        left = self._due - now
        try:
            while left > 2 * _LAYER_S:
                pace.sleep(_LAYER_S)
                left = min(left - _LAYER_S, self._due - pace.clock())
                self.abort.check()
        except StepAborted:
            self._due = 0.0
            raise
        if left > 0:
            pace.sleep(left)
