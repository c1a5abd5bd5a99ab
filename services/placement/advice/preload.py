"""What a worker that is about to be ready should have: the prefixes that are most in demand; and of one that is about
to go, those that only it has. Pure.

Made piece by piece, as decisions wait meanwhile: `step` until it says so, then `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfleet.placement.index.kv_indexer import KvIndexer
from kvfleet.placement.workers.fleet import Worker
from kvfleet.placement.workers.price_kernel import HOST
from kvfleet.placement.workers.prompts import AddressSpace, SharedPrefix
from kvfleet.placement.workers.workloads import Workloads
from kvproto.block_hash import ForkedRoot
from kvproto.messages import HotChain, PreloadRequest, State

AT_ONCE = 32  # prefixes looked up between two decisions: about a millisecond
MOST_CHAINS = 4096
CHAIN_BYTES = 200  # on the wire, beside its hashes


class Preload:
    """One answer in the making: the hottest first of `prefixes`, each as far as somebody has it, until it is `blocks`
    in all or as long as a message may be. What several have in common from the start counts once."""

    def __init__(
        self,
        ask: PreloadRequest,
        prefixes: Sequence[tuple[SharedPrefix, float]],
        workers: Sequence[Worker],
        indexer: KvIndexer,
        workloads: Workloads,
        max_bytes: int,
    ) -> None:
        self._ask = ask
        wanted = ask.model, ask.model_revision, ask.block_size
        self._left = iter(
            [
                (prefix, heat)
                for prefix, heat in prefixes
                if (prefix.model, prefix.space.model_revision, prefix.space.block_size) == wanted
            ]
        )
        asker = next((worker for worker in workers if worker.id == ask.worker), None)
        self._leaving = asker if ask.leaving else None
        self._staying = tuple(w for w in workers if w is not asker and w.state in (State.READY, State.STARTING))
        self._space = asker.space if asker is not None else None
        self._givers = [w for w in workers if _gives(w, ask.worker, asker)]
        self._names: dict[AddressSpace, tuple[str, ...]] = {}
        self._indexer = indexer
        self._workloads = workloads
        self._blocks, self._bytes = ask.blocks, max_bytes
        self._planned: set[bytes] = set()
        self._chains: list[HotChain] = []

    def step(self) -> bool:
        """Look at some more of them; whether it is done."""
        for _ in range(AT_ONCE):
            hot = next(self._left, None)
            if hot is None or self._blocks <= 0 or self._bytes <= 0 or len(self._chains) >= MOST_CHAINS:
                return True
            self._consider(*hot)
        return False

    def plan(self) -> tuple[HotChain, ...]:
        return tuple(self._chains)

    def _consider(self, prefix: SharedPrefix, heat: float) -> None:
        if self._space is not None and prefix.space != self._space:
            return
        source, depth = self._who_has(prefix) if not self._ask.leaving else self._only_there(prefix)
        hashes = [one.tobytes() for one in prefix.hashes[:depth]]
        known = next((at for at, one in enumerate(hashes) if one not in self._planned), depth)
        depth = min(depth, known + self._blocks, max(self._bytes - CHAIN_BYTES, 0) // 16)
        if depth <= known:
            return
        hashes = hashes[:depth]
        self._planned.update(hashes)
        self._blocks -= depth - known
        self._bytes -= CHAIN_BYTES + 16 * depth
        chain, root = b"".join(hashes), prefix.root
        if isinstance(root, ForkedRoot):
            self._chains.append(HotChain(chain, root.own, root.public, root.blocks, source, heat))
        else:
            self._chains.append(HotChain(chain, root, source=source, heat=heat))

    def _who_has(self, prefix: SharedPrefix) -> tuple[str, int]:
        """A worker that has most of it, of equals who has least to do; "" where vaults have more. And how much."""
        givers = [worker for worker in self._givers if worker.space == prefix.space]
        names = self._names.setdefault(prefix.space, tuple(worker.id for worker in givers))
        held = self._indexer.depths(prefix.hashes, names)[HOST].tolist()
        most = max(held, default=0)
        if self._indexer.index.pooled > most:
            return "", self._indexer.index.pooled
        if not most:
            return "", 0
        best = [worker for worker, depth in zip(givers, held, strict=True) if depth == most]
        return min(best, key=lambda one: (self._workloads.of(one.column, 0.0).requests, one.id)).id, most

    def _only_there(self, prefix: SharedPrefix) -> tuple[str, int]:
        """How much of it the worker that is about to go has, if that is more than anybody else has."""
        if self._leaving is None:
            return "", 0
        others = [worker.id for worker in self._staying if worker.space == prefix.space]
        held = self._indexer.depths(prefix.hashes, (self._leaving.id, *others))[HOST].tolist()
        most = max([*held[1:], self._indexer.index.pooled])
        return (self._leaving.id, held[0]) if held[0] > most else ("", 0)


def _gives(worker: Worker, asking: str, asker: Worker | None) -> bool:
    if worker.id == asking or worker.state not in (State.READY, State.DRAINING) or not worker.kv_format:
        return False
    if asker is None or not asker.kv_format:  # just loaded: its record is about to say; what does not fit it refuses
        return True
    return worker.kv_format == asker.kv_format
