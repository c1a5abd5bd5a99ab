"""Questions that take longer than a decision may, answered piece by piece while decisions wait: iterators whose last
item is the answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvfleet.placement.advice.autoscale import mean_rate
from kvfleet.placement.index.kv_indexer import KvIndexer
from kvfleet.placement.index.prefix_index import Counts, Hashes, PrefixIndex
from kvfleet.placement.workers.fleet import Fleet, Worker
from kvfleet.placement.workers.price_kernel import HOST, UNMEASURED_RATE
from kvfleet.placement.workers.prompts import AddressSpace, Heat, SharedPrefix
from kvfleet.placement.workers.workloads import Floats
from kvproto.block_hash import ForkedRoot
from kvproto.messages import HotChain, PreloadRequest, State, VictimCost

PREFIXES_AT_ONCE = 32  # of a plan: about a millisecond
MOST_CHAINS = 4096
CHAIN_BYTES = 200  # on the wire, beside its hashes
ENTRIES_AT_ONCE = 65_536  # of the index: about a millisecond
BLOCKS_AT_ONCE = 8_192  # of prefixes in demand
NONE_FOUND: Counts = np.zeros((0, 2), dtype=np.int64)
RESTARTS = 3  # as workers come and go meanwhile


def preload(
    ask: PreloadRequest, heat: Heat, fleet: Fleet, indexer: KvIndexer, max_bytes: int, now: float
) -> Iterator[tuple[HotChain, ...]]:
    """Blocks for a worker that is about to be ready: the hottest prefixes first, each as far as a worker or vault has
    it, up to `ask.blocks` in all, a common start counted once, or in a message of about `max_bytes`. For a worker that
    is about to go: those that only it has."""
    workers = fleet.of_model(ask.model)
    asker = next((worker for worker in workers if worker.id == ask.worker), None)
    # A worker that was just loaded has no format in its record yet; it refuses blocks that do not fit.
    formats = {asker.kv_format} if asker is not None and asker.kv_format else {w.kv_format for w in workers} - {b""}
    others = [w for w in workers if w is not asker]
    staying = [w for w in others if w.state in (State.READY, State.STARTING)]
    giving = [w for w in others if w.state in (State.READY, State.DRAINING) and w.kv_format in formats]
    givers: dict[AddressSpace, list[Worker]] = {}
    for worker in giving:
        for space in worker.spaces.values():
            givers.setdefault(space, []).append(worker)
    names = {space: tuple(w.id for w in alike) for space, alike in givers.items()}
    wanted = ask.model, ask.model_revision, ask.block_size
    hot = heat.hottest(now)

    def is_wanted(prefix: SharedPrefix) -> bool:
        if asker is not None:
            return asker.spaces.get(prefix.model) == prefix.space
        return (prefix.model, prefix.space.model_revision, prefix.space.block_size) == wanted

    left = (one for one in hot if is_wanted(one[0]))
    planned: set[bytes] = set()
    chains: list[HotChain] = []
    for number, (prefix, warmth) in enumerate(left, 1):
        if ask.blocks <= len(planned) or max_bytes <= 0 or len(chains) >= MOST_CHAINS:
            break
        source, depth = "", 0
        if not ask.leaving:
            held = indexer.depths(prefix.hashes, names.get(prefix.space, ()))[HOST].tolist()
            source, depth = _who_has(held, givers.get(prefix.space, []), fleet, indexer.pooled)
        elif asker is not None:
            source, depth = _only_there(prefix, asker, staying, indexer)
        hashes = [one.tobytes() for one in prefix.hashes[:depth]]
        known = next((at for at, one in enumerate(hashes) if one not in planned), depth)
        depth = min(depth, known + ask.blocks - len(planned), max(max_bytes - CHAIN_BYTES, 0) // 16)
        if depth > known:
            planned.update(hashes[:depth])
            max_bytes -= CHAIN_BYTES + 16 * depth
            chain, root = b"".join(hashes[:depth]), prefix.root
            if isinstance(root, ForkedRoot):
                chains.append(HotChain(chain, root.own, root.public, root.blocks, source, warmth))
            else:
                chains.append(HotChain(chain, root, source=source, heat=warmth))
        if number % PREFIXES_AT_ONCE == 0:
            yield ()
    yield tuple(chains)


def _who_has(held: Sequence[int], givers: Sequence[Worker], fleet: Fleet, pooled: int) -> tuple[str, int]:
    """The giver that `held` says has most of a prefix, of equals with fewest requests, or "" where vaults have more;
    and its blocks."""
    most = max(held, default=0)
    if pooled > most:
        return "", pooled
    if not most:
        return "", 0
    best = [worker for worker, depth in zip(givers, held, strict=True) if depth == most]
    requests = fleet.workloads.requests_of(np.array([worker.column for worker in best]))
    return best[int(requests.argmin())].id, most


def _only_there(
    prefix: SharedPrefix, leaving: Worker, staying: Sequence[Worker], indexer: KvIndexer
) -> tuple[str, int]:
    """The worker that is about to go and its blocks, if no other one has as many."""
    others = [worker.id for worker in staying if worker.spaces.get(prefix.model) == prefix.space]
    held = indexer.depths(prefix.hashes, (leaving.id, *others))[HOST].tolist()
    most = max([*held[1:], indexer.pooled])
    return (leaving.id, held[0]) if held[0] > most else ("", 0)


def survey(model: str, heat: Heat, fleet: Fleet, indexer: KvIndexer, now: float) -> Iterator[tuple[VictimCost, ...]]:
    """Which ready worker of `model`, or with "" of all models that have several, is the cheapest to lose: cheapest
    first, of equals the one with fewest requests.

    A worker takes the blocks with it that no vault and no worker that stays has. `seconds` is how long those in demand
    take to compute again: each block at the mean of the measured rates, weighted with h / (1 + h) for the h requests of
    about the last half hour whose match went through it and ended where prompts part ways.
    """
    workers = fleet.of_model("")
    asked = [w for w in workers if w.state is State.READY and model in ("", *w.spaces)]
    staying = [w for w in workers if w.state in (State.READY, State.STARTING)]
    hot = [one for one in heat.hottest(now) if not model or fleet.base_of(one[0].model) == fleet.base_of(model)]
    for restarts_left in range(RESTARTS, -1, -1):
        generation = indexer.index.generation
        at = {worker.id: indexer.holder_of(worker.id) for worker in staying}
        holders = {name: holder for name, holder in at.items() if holder is not None}
        alone = _Alone(indexer.index, indexer.index.mask_of(holders.values()))
        for _ in alone.count(hot):
            yield ()
            if restarts_left and indexer.index.generation != generation:
                break
        else:
            break
    rate = mean_rate(worker.rates for worker in asked) or UNMEASURED_RATE
    seconds, hot_blocks = alone.weigh(rate)
    counts = fleet.workloads.requests_of(np.array([worker.column for worker in asked], dtype=np.int64)).tolist()
    found = []
    for worker, requests in zip(asked, counts, strict=True):
        if fleet.workers.get(worker.id) is not worker or worker.state is not State.READY:
            continue  # it left meanwhile
        if not model and any(len(fleet.ready(name).workers) < 2 for name in worker.spaces):
            continue  # no other one serves its model, or an adapter of it
        cost, unique, hot_ones = 0.0, 0, 0  # unknown for workers that the index has no room for
        if (holder := holders.get(worker.id)) is not None:
            cost, unique = round(float(seconds[holder]), 6), int(alone.counts[holder])
            hot_ones = int(hot_blocks[holder])
        found.append(VictimCost(worker.id, cost, unique, hot_ones, int(requests)))
    yield tuple(sorted(found, key=lambda one: (one.seconds, one.requests, one.unique_blocks, one.worker)))


class _Alone:
    """The blocks that one of the `counted` holders has, and neither another one of them nor a vault."""

    def __init__(self, index: PrefixIndex, counted: Hashes) -> None:
        self._index, self._counted = index, counted
        self.counts: Counts = np.zeros(64 * len(counted), dtype=np.int64)  # of each holder
        self._hot: list[tuple[Counts, Floats, Floats]] = [(NONE_FOUND, np.zeros(0), np.zeros(0))]

    def count(self, prefixes: Sequence[tuple[SharedPrefix, float]]) -> Iterator[None]:
        """All of them, and those of `prefixes` in demand; a piece of about a millisecond each time."""
        for first in range(0, self._index.max_blocks, ENTRIES_AT_ONCE):
            self._index.count_sole(self._counted, first, first + ENTRIES_AT_ONCE, self.counts)
            yield
        several: list[tuple[SharedPrefix, float]] = []
        blocks = 0
        for number, (prefix, heat) in enumerate(prefixes, 1):
            several.append((prefix, heat))
            blocks += len(prefix.hashes)
            if blocks >= BLOCKS_AT_ONCE or number == len(prefixes):
                self._look_at(several)
                several, blocks = [], 0
                yield

    def _look_at(self, several: Sequence[tuple[SharedPrefix, float]]) -> None:
        """Note entry and holder of each block that one has alone, its heat and tokens."""
        hashes = np.concatenate([prefix.hashes for prefix, _ in several])
        lengths = [len(prefix.hashes) for prefix, _ in several]
        of_each = np.array([(heat, prefix.space.block_size) for prefix, heat in several], dtype=float)
        heat, tokens = np.repeat(of_each, lengths, axis=0).T
        found = self._index.sole_holders(hashes, self._counted)
        alone = found[:, 1] >= 0
        self._hot.append((found[alone], heat[alone], tokens[alone]))

    def weigh(self, rate: float) -> tuple[Floats, Counts]:
        """Of each holder, seconds to compute its unique blocks in demand again, and their number. A block of several
        prefixes counts once, with the heat of all."""
        found, heats, tokens = (np.concatenate(several) for several in zip(*self._hot, strict=True))
        entries, first, which = np.unique(found[:, 0], return_index=True, return_inverse=True)
        heat = np.bincount(which, weights=heats, minlength=len(entries))
        holders = found[first, 1]
        seconds = tokens[first] / rate * heat / (1 + heat)
        of_each = np.zeros(len(self.counts))
        np.add.at(of_each, holders, seconds)
        blocks: Counts = np.bincount(holders, minlength=len(self.counts))
        return of_each, blocks
