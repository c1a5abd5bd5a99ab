"""What to fetch and what to compute: the cheapest mixture, from measured figures. Pure.

    device ──hit──▶ | host ──▶ | vault ──▶ | peer ──▶ | computed
                    start                                       end

Restoring k more blocks and computing the rest costs `latency + k * bytes / rate + what the rest takes to compute`.
Within one tier that grows or falls all the way, so the ends of tiers are the only candidates. The same reasoning prices
workers in placement (`price_kernel`), from the same measurements, which heartbeats carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvfleet.worker.tiers.speed import LinkSpeed
from kvproto.messages import Tier

SURE = 1.5  # predictions are taken for so much too good,
HANDLING_S = 0.002  # and a restore takes so long beside: a step of few tokens takes hardly less than one of some more
LOOK_WORTH_S = 0.02  # what takes no longer to compute is not worth a question to anybody


class Offer(NamedTuple):
    """A tier that has all blocks up to `end`, as far as it is needed for them."""

    tier: Tier
    end: int
    speed: LinkSpeed


class RestoredPart(NamedTuple):
    """Blocks `start` to `end` from a tier; `seconds` is what that is expected to take."""

    tier: Tier
    start: int
    end: int
    seconds: float


def cheapest(
    offers: Sequence[Offer], start: int, *, block_bytes: int, compute_s: Callable[[int, int], float]
) -> list[RestoredPart]:
    """Parts to restore, in the order of the chain; empty if computing everything costs less.

    `start`: blocks that are on the device. `offers`: fastest tier first. `compute_s`: seconds to compute blocks from
    the first number to the second.
    """
    parts: list[RestoredPart] = []
    best, saved, best_saved, at = 0, -HANDLING_S, 0.0, start
    for tier, end, (latency_s, bytes_per_s) in offers:
        if end <= at or bytes_per_s <= 0:
            continue
        seconds = latency_s + (end - at) * block_bytes / bytes_per_s
        saved += compute_s(at, end) - SURE * seconds
        parts.append(RestoredPart(tier, at, end, seconds))
        at = end
        if saved > best_saved:
            best, best_saved = len(parts), saved
    return parts[:best]


def is_worth_going_on(missing: int, arrived: int, elapsed_s: float, *, block_s: float) -> bool:
    """Whether a restore that takes longer than predicted is better waited for: at the pace it showed, the blocks it
    still has to bring come well before they could be computed."""
    return arrived > 0 and 2 * elapsed_s / arrived < block_s and missing > 0
