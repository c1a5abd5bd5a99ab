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

from kvfleet.placement.advice.autoscale import mean_rate
from kvfleet.placement.index.kv_indexer import KvIndexer
from kvfleet.placement.index.prefix_index import Counts
from kvfleet.placement.workers.fleet import Fleet
from kvfleet.placement.workers.price_kernel import UNMEASURED_RATE
from kvfleet.placement.workers.prompts import SharedPrefix
from kvfleet.placement.workers.workloads import Floats, Workloads
from kvproto.messages import State, VictimCost

ENTRIES_AT_ONCE = 65_536  # of the index: about a millisecond
BLOCKS_AT_ONCE = 8_192  # of prefixes in demand
NONE_FOUND: Counts = np.zeros((0, 2), dtype=np.int64)
RESTARTS = 3  # as workers come and go meanwhile


class Survey:
    """One answer in the making, about the ready workers of `model`; for "", of all models that have more than one."""

    def __init__(
        self,
        model: str,
        fleet: Fleet,
        prefixes: Sequence[tuple[SharedPrefix, float]],
        indexer: KvIndexer,
        workloads: Workloads,
    ) -> None:
        self._model, self._fleet = model, fleet
        workers = fleet.of_model("")
        self._asked = [w for w in workers if w.state is State.READY and model in ("", w.model)]
        self._staying = [w for w in workers if w.state in (State.READY, State.STARTING)]
        self._hot = [(prefix, heat) for prefix, heat in prefixes if model in ("", prefix.model)]
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
        elif self._prefix < len(self._hot):
            self._look_at_prefixes()
        return self._entry >= index.max_blocks and self._prefix >= len(self._hot)

    def costs(self) -> tuple[VictimCost, ...]:
        """Cheapest first; of equals the one with least to do."""
        seconds, hot_blocks = self._weigh()
        found = []
        for worker in self._asked:
            if self._fleet.workers.get(worker.id) is not worker or worker.state is not State.READY:
                continue  # meanwhile it went by itself
            if not self._model and len(self._fleet.ready(worker.model).workers) < 2:
                continue  # nobody would serve its model
            holder = self._holders.get(worker.id)
            requests = int(self._workloads.of(worker.column, self._workloads.now).requests)
            if holder is None:  # more workers than there was room for: nothing is known of it
                found.append(VictimCost(worker.id, 0.0, 0, 0, requests))
            else:
                unique = int(self._counts[holder])
                cost = round(float(seconds[holder]), 6)
                found.append(VictimCost(worker.id, cost, unique, int(hot_blocks[holder]), requests))
        return tuple(sorted(found, key=lambda one: (one.seconds, one.requests, one.unique_blocks, one.worker)))

    def _begin(self) -> None:
        index = self._indexer.index
        at = {worker.id: self._indexer.holder_of(worker.id) for worker in self._staying}
        self._generation = index.generation
        self._holders = {name: holder for name, holder in at.items() if holder is not None}
        self._counted = index.mask_of(self._holders.values())
        self._counts: Counts = np.zeros(64 * len(self._counted), dtype=np.int64)
        self._alone: list[tuple[Counts, Floats, Floats]] = [(NONE_FOUND, np.zeros(0), np.zeros(0))]
        self._entry = self._prefix = 0

    def _look_at_prefixes(self) -> None:
        """Of some of them: entry and holder of each block that one has alone, its heat and how many tokens it is."""
        first, blocks = self._prefix, 0
        while blocks < BLOCKS_AT_ONCE and self._prefix < len(self._hot):
            blocks += len(self._hot[self._prefix][0].hashes)
            self._prefix += 1
        prefixes, heats = zip(*self._hot[first : self._prefix], strict=True)
        hashes = np.concatenate([prefix.hashes for prefix in prefixes])
        lengths = [len(prefix.hashes) for prefix in prefixes]
        heat = np.repeat(np.array(heats, dtype=float), lengths)
        tokens = np.repeat(np.array([prefix.space.block_size for prefix in prefixes], dtype=float), lengths)
        found = self._indexer.index.sole_holders(hashes, self._counted)
        alone = found[:, 1] >= 0
        self._alone.append((found[alone], heat[alone], tokens[alone]))

    def _weigh(self) -> tuple[Floats, Counts]:
        """Of each holder, seconds to compute again what it alone has of prefixes in demand, and how many blocks those
        are. One that lies in several prefixes is one block, asked for by all of them."""
        found, heats, tokens = (np.concatenate(several) for several in zip(*self._alone, strict=True))
        entries, first, which = np.unique(found[:, 0], return_index=True, return_inverse=True)
        heat = np.bincount(which, weights=heats, minlength=len(entries))
        holders = found[first, 1]
        rate = mean_rate(worker.rates for worker in self._asked) or UNMEASURED_RATE
        seconds = tokens[first] / rate * heat / (1 + heat)
        of_each = np.zeros(len(self._counts))
        np.add.at(of_each, holders, seconds)
        blocks: Counts = np.bincount(holders, minlength=len(self._counts))
        return of_each, blocks
