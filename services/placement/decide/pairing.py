"""Whether a prompt is prefilled at one worker and goes on at another. Pure: it compares seconds.

    whole  queue + slot + fetch + prefill here + SLOWED of that prefill for each sequence here + crowd
    apart  queue + slot + fetch + prefill there + what is left to fetch at its end + HAND_OVER_S + slot + crowd

* SLOWED: beside a prompt a step may take 2.5 times as long (the worker's ITL target), so a sequence that decodes there
  gets 0.4 tokens for one;
* what is left: blocks go over while prefill goes on, all but those of the last step; a link that is slower than prefill
  is waited for;
* crowd: what the sequences there add to each step of this one, over its output.

The queue of a busy prefill worker counts against it, so a burst of prompts spills over to the others, and a short or
well-cached prompt, whose prefill is not worth a hand-over, stays where it decodes. All rates are measured ones.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import numpy as np

from kvfleet.placement.policies import Choice, Question
from kvfleet.placement.workers import price_kernel as kernel
from kvfleet.placement.workers.workloads import Floats

SLOWED = 0.6  # of each second of prefill, to a sequence that decodes beside it
HAND_OVER_S = 0.05  # between a first token and the second one, when all blocks are there
LAST_TOKENS = 2048  # of the last step of a prefill: their blocks come at its end
UNMEASURED_BYTES_PER_S = 1e9  # of a link that no block has crossed yet
PLANNED_S = 30.0  # by then a planned successor has the request, or never gets it
MOST_PLANNED = 65_536

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Pair:
    """The choice of a prefill worker, and who goes on."""

    choice: Choice
    then: str


@dataclass(eq=False, slots=True)
class Pairing:
    """Owned by the decider. It remembers who was promised which requests: those are not among their load yet."""

    planned: OrderedDict[Key, tuple[str, float]] = field(default_factory=OrderedDict)  # oldest first
    pairs_total: int = 0
    promised: Counter[str] = field(default_factory=Counter)  # of these, by who goes on

    def plan(self, whole: Question, choice: Choice, prompts: Question, prefiller: Choice, now: float) -> Pair | None:
        """A pair that costs less than `choice`; None: the request stays whole. Both questions are about one request,
        each with the workers of one role as candidates."""
        self.forget(now)
        if choice.prices is None or prefiller.prices is None:
            return None
        here = next(at for at, one in enumerate(whole.candidates) if one.id == choice.worker)
        there = next(at for at, one in enumerate(prompts.candidates) if one.id == prefiller.worker)
        kv_format = prompts.candidates[there].kv_format
        may = [bool(kv_format) and one.kv_format == kv_format and one.role is not None for one in whole.candidates]
        if not any(may):
            return None
        crowds = self._crowds(whole)
        prefill_s = float(choice.prices[kernel.PREFILL, here])
        busy = float(whole.loads.requests[here])
        whole_s = _ttft(choice.prices, here) + SLOWED * busy * prefill_s + crowds[here]
        first_s = _ttft(prefiller.prices, there)
        left = self._left_s(whole, float(prefiller.prices[kernel.PREFILL, there]))
        after = np.where(may, left + choice.prices[kernel.SLOT] + crowds, np.inf)
        successor = int(after.argmin())
        apart_s = first_s + HAND_OVER_S + float(after[successor])
        if apart_s >= whole_s:
            return None
        then = whole.candidates[successor].id
        why = (
            f"prefill here, {first_s * 1000:.0f} ms, then {then}: {apart_s * 1000:.0f} ms in all, "
            f"{whole_s * 1000:.0f} ms as a whole at {choice.worker}"
        )
        return Pair(Choice(prefiller.worker, why, prefiller.prices), then)

    def note(self, key: Key, then: str, now: float) -> None:
        self.pairs_total += 1
        self.settled(key)
        self.planned[key] = then, now
        self.promised[then] += 1
        if len(self.planned) > MOST_PLANNED:
            self.settled(next(iter(self.planned)))

    def settled(self, key: Key) -> None:
        """The request is placed again: whatever was planned for it."""
        then, _ = self.planned.pop(key, ("", 0.0))
        if then:
            self.promised[then] -= 1
            if not self.promised[then]:
                del self.promised[then]

    def forget(self, now: float) -> None:
        """What is too old."""
        while self.planned and now - next(iter(self.planned.values()))[1] > PLANNED_S:
            self.settled(next(iter(self.planned)))

    def _crowds(self, whole: Question) -> Floats:
        """Seconds that the sequences at each candidate, and those promised to it, add to this one's output."""
        values = whole.loads.values
        coming = np.array([float(self.promised[one.id]) for one in whole.candidates])
        measured = values[kernel.TOKEN_S][values[kernel.TOKEN_S] > 0]
        token_s = float(measured.min()) if len(measured) else 0.0
        crowds: Floats = (values[kernel.REQUESTS] + coming) * token_s * np.maximum(values[kernel.OUTPUT], 1.0)
        return crowds

    def _left_s(self, whole: Question, prefill_s: float) -> Floats:
        """Seconds that each candidate still fetches when a prefill of `prefill_s` has ended."""
        values = whole.loads.values
        speeds = values[kernel.RESTORE + kernel.PEER]
        speeds = np.where(speeds > 0, speeds, UNMEASURED_BYTES_PER_S)
        token_s = values[kernel.TOKEN_BYTES] / speeds
        tokens = np.maximum(whole.prompt_tokens - whole.held, 0.0)
        left: Floats = np.maximum(np.minimum(tokens, LAST_TOKENS) * token_s, tokens * token_s - prefill_s)
        return left


def _ttft(prices: Floats, number: int) -> float:
    return float(sum(prices[term, number] for term in kernel.TTFT_TERMS))
