"""Computes restored blocks again, while the engine is idle, and compares. The engine's thread owns it.

A checksum says that bytes are those that were stored, not that they were right. So the last block of a sampled chain
is run through the model on the blocks before it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvfleet.worker.model.base import ModelRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvfleet.worker.tiers.restorer import RestoreSample
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.errors import OutOfMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verifier:
    runner: ModelRunner
    tiers: Tiers

    @property
    def has_work(self) -> bool:
        return bool(self.tiers.restorer.samples) and not self.tiers.restorer.waiting

    def check_one(self) -> None:
        """Takes a step of one block. A wrong block is discarded with all blocks that came with it."""
        sample, tiers = self.tiers.restorer.samples.popleft(), self.tiers
        difference = self._difference(sample)
        if difference is None or difference <= self.runner.tolerance:
            return
        source = sample.source or "this host"
        logger.error("a block restored from %s is wrong: its numbers differ by %.3g of the largest", source, difference)
        tiers.restorer.failures_total[sample.tier, "wrong"] += 1
        tiers.discard(sample.root, sample.hashes[: sample.start + 1])
        if tiers.remote is not None and sample.source:
            tiers.remote.distrust(sample.source)

    def _difference(self, sample: RestoreSample) -> float | None:
        """Relative to the largest number; None if the block was evicted meanwhile, or there is no room."""
        pool = self.tiers.pool
        at, size = len(sample.hashes) - 1, pool.block_size
        chain = pool.chain_to(sample.hashes)
        if len(chain) <= at or pool.index[chain[at]].lossy or pool.available <= pool.idle_among(chain):
            return None
        pool.acquire(chain)
        scratch = pool.allocate(1)
        try:
            self.runner.run([Slice(sample.ids, at * size, [*chain[:at], *scratch], None)])
            return self.runner.difference(scratch[0], chain[at])
        except OutOfMemory as error:
            logger.debug("a restored block was not checked: %s", error)
            return None
        finally:
            pool.release(scratch)
            pool.release(chain)
