"""Which worker is the cheapest to lose? Pure.

What is lost with a worker are the blocks that nobody else has: no vault, and no other worker that stays. Of those that
lie in prefixes in demand, `seconds` is how long the others would take to compute them again: each block at the mean of
the measured rates, weighted with h / (1 + h) for the h requests of about the last half hour whose match went through it
and ended where prompts part ways. What nobody asks for costs nothing.

The index is gone through piece by piece, as decisions wait meanwhile: `step` until it says so, then `costs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvproto.messages import State, VictimCost
from services.placement.fleet import Fleet
from services.placement.heat import HotPrefix
from services.placement.index.kv_indexer import KvIndexer
from services.placement.index.prefix_index import Counts, Hashes
from services.placement.price_kernel import UNMEASURED_RATE
from services.placement.prompts import NO_HASHES
from services.placement.workloads import Floats, Workloads

ENTRIES_AT_ONCE = 65_536  # of the index: about a millisecond
BLOCKS_AT_ONCE = 8_192  # of prefixes in demand
RESTARTS = 3  # as workers come and go meanwhile


class Survey:
    """One answer in the making, about the ready workers of `model`, or of any for ""."""

    def __init__(
        self,
        model: str,
        fleet: Fleet,
        prefixes: Sequence[HotPrefix],
        indexer: KvIndexer,
        workloads: Workloads,
    ) -> None:
        self._fleet = fleet
        workers = fleet.of_model("")
        self._asked = [w for w in workers if w.state is State.READY and model in ("", w.model)]
        self._staying = [w for w in workers if w.state in (State.READY, State.STARTING)]
        hot = [one for one in prefixes if model in ("", one.prefix.model)]
        self._hot: Hashes = np.concatenate([NO_HASHES, *(one.prefix.hashes for one in hot)])
        lengths = [len(one.prefix.hashes) for one in hot]
        self._heat: Floats = np.repeat(np.array([one.heat for one in hot], dtype=float), lengths)
        sizes = np.array([one.prefix.space.block_size for one in hot], dtype=float)
        self._tokens: Floats = np.repeat(sizes, lengths)
        self._indexer = indexer
        self._workloads = workloads
        self._restarts = 0
        self._begin()

    def step(self) -> bool:
        """Go on for about a millisecond; whether it is done."""
        index = self._indexer.index
        if index.generation != self._generation and self._restarts < RESTARTS:
            self._restarts += 1
            self._begin()
        if self._entry < index.max_blocks:
            index.count_sole(self._counted, self._entry, self._entry + ENTRIES_AT_ONCE, self._counts)
            self._entry += ENTRIES_AT_ONCE
        elif self._block < len(self._hot):
            piece = slice(self._block, self._block + BLOCKS_AT_ONCE)
            self._found[piece] = index.sole_holders(self._hot[piece], self._counted)
            self._block += BLOCKS_AT_ONCE
        return self._entry >= index.max_blocks and self._block >= len(self._hot)

    def costs(self) -> tuple[VictimCost, ...]:
        """Cheapest first; of equals whoever has least to do."""
        seconds, hot_blocks = self._weigh()
        found = []
        for worker in self._asked:
            if self._fleet.workers.get(worker.id) is not worker or worker.state is not State.READY:
                continue  # meanwhile it went by itself
            holder = self._holders.get(worker.id)
            requests = int(self._workloads.of(worker.column, self._workloads.now).requests)
            if holder is None:  # more workers than there was room for: nothing is known of it
                found.append(VictimCost(worker.id, 0.0, 0, 0, requests))
            else:
                unique = int(self._counts[holder])
                cost = round(float(seconds[holder]), 6)
                found.append(VictimCost(worker.id, cost, unique, int(hot_blocks[holder]), requests))
        return tuple(sorted(found, key=lambda one: (one.seconds, one.requests, one.unique_blocks, one.worker)))

    # ------------------------------------------------------------------ inside

    def _begin(self) -> None:
        index = self._indexer.index
        at = {worker.id: self._indexer.holder_of(worker.id) for worker in self._staying}
        self._generation = index.generation
        self._holders = {name: holder for name, holder in at.items() if holder is not None}
        self._counted = index.mask_of(self._holders.values())
        self._counts: Counts = np.zeros(64 * len(self._counted), dtype=np.int64)
        self._found: Counts = np.full((len(self._hot), 2), -1, dtype=np.int64)
        self._entry = self._block = 0

    def _weigh(self) -> tuple[Floats, Counts]:
        """Of each holder, seconds to compute again what it alone has of prefixes in demand, and how many blocks those
        are. One that lies in several prefixes is one block, asked for by all of them."""
        alone = self._found[:, 1] >= 0
        entries, first, which = np.unique(self._found[alone, 0], return_index=True, return_inverse=True)
        heat = np.bincount(which, weights=self._heat[alone], minlength=len(entries))
        holders = self._found[alone, 1][first]
        seconds = self._tokens[alone][first] / self._rate() * heat / (1 + heat)
        width = len(self._counts)
        of_each = np.zeros(width)
        np.add.at(of_each, holders, seconds)
        blocks: Counts = np.bincount(holders, minlength=width)
        return of_each, blocks

    def _rate(self) -> float:
        """Prefill tokens/s of a worker as they are in the mean."""
        rates = [w.rates.prefill_tokens_per_s for w in self._asked if w.rates.prefill_tokens_per_s > 0]
        return len(rates) / sum(1 / rate for rate in rates) if rates else UNMEASURED_RATE
