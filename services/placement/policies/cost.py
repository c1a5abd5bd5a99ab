"""The cheapest worker, in seconds. Pure.

    cost = queue + slot + step + fetch + prefill + copy + harm

* queue, slot: until queued work has been prefilled, and until a slot is free;
* step: one decode step of the running sequences goes with the first token;
* fetch, prefill: blocks in slower tiers, in vaults or at a peer are restored as far as that is quicker than to compute
  them again, the rest is prefilled, all at measured rates;
* harm: of the prefill to others, `lasting * (OTHERS + BUSY * u)`, u being the share of the last minute that the worker
  was given to do. Prefill that a cache could have saved delays later requests and evicts blocks that they would have
  found; the more so, the busier the worker. So new work goes to idle workers, and a request whose prefix is cached pays
  next to nothing for a busy one.

A prefix that is cached elsewhere and prefilled here becomes a copy. Of the last half hour's requests that part ways
after it, h will find the copy, by how long the worker's cache keeps unused blocks. One part in 1 + h counts as harm.
The same share of the request's own delay by it counts, up to half a second (`copy`, which is negative, takes off the
rest): that is the most that one request waits for the others' sake.

The two constants have no unit. On the conversation trace of benchmarks.trace_hits (8 workers, a cache of a tenth of
its blocks each, half and nine tenths of capacity) OTHERS from 0 to 9 and BUSY from 30 to 80 do about equally well. With
BUSY at 0 the load of a minute varies 2.6 times as much, and near capacity a twentieth of the hits is lost; with OTHERS
at 0, 6 % of turns move instead of 5.

Of workers that cost about the same, the one with most of a conversation keeps it, if that is half of the prompt, so
that none wanders; else the ring decides, so that new prompts meet on one worker, whichever replica decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfleet.placement.policies.base import Choice, Question
from kvfleet.placement.workers.price_kernel import DEVICE, FETCH, PREFILL, QUEUE, RESTORED, SLOT, cheapest
from kvfleet.placement.workers.workloads import Floats

OTHERS = 4.0
BUSY = 70.0
IN_DEMAND = 3.0  # heat: a prefix that so many share is no conversation
NEAR_S, NEAR = 0.002, 0.02  # costs that differ by less, or by less than this share, are equal


@dataclass(frozen=True, slots=True)
class Cost:
    """Least expected time to first token plus the harm done to others."""

    name = "cost"
    others: float = OTHERS
    busy: float = BUSY

    def choose(self, question: Question) -> Choice | None:
        if not question.candidates:
            return None
        priced = question.loads.price(
            question.matched, question.prompt_tokens, heat=question.heat, others=self.others, busy=self.busy
        )
        equals = np.empty(len(question.candidates), dtype=np.int64)
        keeps = question.heat < IN_DEMAND
        number, near = cheapest(priced, question.held, question.prompt_tokens, keeps, NEAR_S, NEAR, equals)
        if near > 1:
            _, number = question.first_on_the_ring(equals[:near].tolist())
        return Choice(question.candidates[number].id, _why(question, priced, number, near), priced)


def _why(question: Question, priced: Floats, number: int, near: int) -> str:
    waits = (priced[QUEUE, number] + priced[SLOT, number]) * 1000
    restored = sum(priced[RESTORED:, number].tolist())
    held = int(question.matched[DEVICE, number] + restored)
    restores = f"{priced[FETCH, number] * 1000:.0f} ms for {int(restored)} tokens to come, " if restored else ""
    prefill = f"{priced[PREFILL, number] * 1000:.0f} ms prefill after {held} cached tokens"
    text = f"{waits:.0f} ms queue, {restores}{prefill}"
    return f"{text}; first on the ring of {near} that cost as little" if near > 1 else f"cheapest: {text}"
