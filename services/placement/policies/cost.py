"""The cheapest worker, in seconds. Pure.

    cost = queue + slot + step + fetch + prefill + copy + harm

* queue, slot: until what is queued there has been prefilled, and until a slot is free;
* step: one decode step of those who are there already goes with the first token;
* fetch, prefill: blocks that it has in slower tiers, that vaults have or another worker, are restored as far as that is
  quicker than computing them again, the rest is prefilled, all at the rates that it measured;
* harm: what the prefill does to others, `lasting * (OTHERS + BUSY * u)`, u being the share of the last minute that the
  worker was given to do. A second of prefill that a cache could have saved delays those who come next and pushes out
  what they would have found; the more so, the busier the worker. As the harm grows with both factors, the work that
  must be done somewhere goes where little was done, and a request whose prefix is cached pays next to nothing for going
  there, however busy it is.

What is prefilled here though it is cached elsewhere is a copy for all who come while it lasts. Of a prefix after which
requests part, those of the last half hour are counted, and h of them will find the copy: as many as come before a gap
that is longer than the worker's cache keeps what nobody uses, as told by what it was given in the last minute. One part
in 1 + h counts as harm. Of what this request feels of it the same share counts, up to half a second of it (`copy`,
which is negative, takes off the rest): no more is asked of one for the others' sake.

The two constants have no unit. On the conversation trace of benchmarks.trace_hits (8 workers, a cache of a tenth of
its blocks each, half and nine tenths of capacity) OTHERS from 0 to 9 and BUSY from 30 to 80 do about equally well. With
BUSY at 0 the load of a minute varies 2.6 times as much, and near capacity a twentieth of the hits is lost; with OTHERS
at 0, 6 % of turns move instead of 5, as then nothing but its own wait keeps a request where nobody is busy.

Among those whose costs are nearly equal, the one that holds most of a conversation that is mostly held keeps it, so
that none wanders on workers so fast that nothing matters; else the ring decides: what nobody holds meets on one worker,
whichever replica decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfleet.placement.policies.base import Choice, Question
from kvfleet.placement.workers.price_kernel import DEVICE, FETCH, PREFILL, QUEUE, RESTORED, SLOT, cheapest
from kvfleet.placement.workers.workloads import Floats

OTHERS = 4.0
BUSY = 70.0
IN_DEMAND = 3.0  # heat: what ends where so many requests do is no conversation
NEAR_S = 0.002  # costs that differ by less than this, or by this share, are equal
NEAR = 0.02


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
