"""Computes restored blocks again and compares: whether what comes from below is what this model would have computed.

A checksum says that bytes are those that were stored, not that they were right. So now and then, when there is nothing
else to do, the last block of a restored chain is run through the model on the blocks before it. What differs by more
than rounding is thrown away with all that continues it, and its source is not trusted. The engine's thread
owns it.

It happens while no sequence runs or waits, so nothing has to be taken from anybody. What is being copied or lent at
that moment stays with those who copy it, and is found by nobody any more.
"""

from __future__ import annotations

import logging
from enum import Enum, auto

from kvfleet.worker.model.base import ModelRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvfleet.worker.tiers.restore_job import RestoreSample
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.errors import OutOfMemory

logger = logging.getLogger(__name__)


class BlockVerdict(Enum):
    RIGHT = auto()
    WRONG = auto()
    GONE = auto()  # evicted meanwhile: nothing to compare


class Verifier:
    def __init__(self, runner: ModelRunner, tiers: Tiers) -> None:
        self.checked_total = 0
        self.wrong_total = 0
        self._runner = runner
        self._tiers = tiers

    @property
    def has_work(self) -> bool:
        return bool(self._tiers.restorer.samples) and not self._tiers.restorer.waiting

    def check_one(self) -> BlockVerdict:
        """Takes a step of one block."""
        sample = self._tiers.restorer.samples.popleft()
        verdict = self._compare(sample)
        if verdict is not BlockVerdict.GONE:
            self.checked_total += 1
        if verdict is BlockVerdict.WRONG:
            self.wrong_total += 1
            self._throw_away(sample)
        return verdict

    def _compare(self, sample: RestoreSample) -> BlockVerdict:
        pool = self._tiers.pool
        at, size = len(sample.hashes) - 1, pool.block_size
        chain = pool.chain_to(sample.hashes)
        if len(chain) <= at or pool.content(chain[at]).lossy or pool.available <= pool.idle_among(chain):
            return BlockVerdict.GONE
        pool.acquire(chain)
        scratch = pool.allocate(1)
        try:
            self._runner.run([Slice(sample.ids, at * size, [*chain[:at], *scratch], None)])
            difference = self._runner.difference(scratch[0], chain[at])
        except OutOfMemory as error:
            logger.debug("a restored block was not checked: %s", error)
            return BlockVerdict.GONE
        finally:
            pool.release(scratch)
            pool.release(chain)
        if difference <= self._runner.tolerance:
            return BlockVerdict.RIGHT
        source = sample.source or "this host"
        logger.error("a block restored from %s is wrong: its numbers differ by %.3g of the largest", source, difference)
        return BlockVerdict.WRONG

    def _throw_away(self, sample: RestoreSample) -> None:
        """All that came with it, and what continues it, on device and host and in vaults."""
        tiers = self._tiers
        tiers.restorer.failures_total[sample.tier, "wrong"] += 1
        tiers.discard(sample.root, sample.hashes[: sample.start + 1])
        if tiers.remote is not None and sample.source:
            tiers.remote.distrust(sample.source)
