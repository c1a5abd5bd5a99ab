"""What lower tiers offer of a sequence's chain, and how long it is worth looking and waiting for it. Pure.

It asks tiers what they have and how fast they are, and changes nothing. Which offers are taken: see `break_even`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvfleet.worker.blocks.chain_location import ChainLocation
from kvfleet.worker.schedule.sequence import Sequence
from kvfleet.worker.tiers.base import Remote
from kvfleet.worker.tiers.break_even import LOOK_WORTH_S, Offer
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.speed import LinkSpeed
from kvproto.messages import Tier

ANSWER_LIMIT_S = 0.03
HANDED_LOOK_S = 2.0  # what was handed over is worth waiting for: a source may have to be connected to first,
HANDED_ANSWER_S = 2.2  # which a busy host does late; a source that refuses or does not connect ends the look sooner
FAR_LOOK_S = 1.0  # a peer in another region may have to be connected to, and measured, first;
FAR_ANSWER_S = 1.2
FAR_WORTH_S = 0.3  # so only for what takes so long to compute
HANDED_BLOCK_S = 0.25  # and each of its blocks counts as if it took so long to compute
HANDED_SPEED = LinkSpeed(0.01, 1e9)  # of a peer, or vaults, that were never measured

ComputeSeconds = Callable[[int, int], float]  # to compute blocks from the first number to the second


def location_of(sequence: Sequence) -> ChainLocation | None:
    """What was found of its chain, if it still is its chain."""
    location = sequence.spec.location
    if location is None or not location.names or sequence.start or location.names[0].hash != sequence.hashes[0]:
        return None
    return location


def price_of_computing(location: ChainLocation | None, compute_s: ComputeSeconds) -> ComputeSeconds:
    """What was handed over is dear to compute, however quickly it could be."""
    if location is None or not location.handed_over:
        return compute_s
    return lambda start, end: compute_s(start, end) + HANDED_BLOCK_S * max(0, end - start)


def look_worth_s(location: ChainLocation) -> float:
    """What takes no longer to compute is not waited for."""
    return FAR_WORTH_S if location.far else LOOK_WORTH_S


def answer_limit_s(location: ChainLocation) -> float:
    """How long a sequence waits for what is found."""
    return FAR_ANSWER_S if location.far else HANDED_ANSWER_S if location.handed_over else ANSWER_LIMIT_S


def host_offers(host: HostTier | None, bytes_per_s: float, sequence: Sequence, start: int, usable: int) -> list[Offer]:
    """Of the blocks from `start` up to `usable`, copied at such a speed."""
    if host is None or not bytes_per_s:
        return []
    depth = host.depth(sequence.hashes, start, usable, exact=sequence.spec.exact)
    return [Offer(Tier.HOST, depth, LinkSpeed(0.0, bytes_per_s))]


def remote_offers(
    remote: Remote, location: ChainLocation, vault: int, peer: int, *, hopes: bool = False
) -> list[Offer]:
    """If they have so many blocks. `hopes`: a peer that is being measured may turn out to be fast."""
    offers = []
    for tier, depth in ((Tier.VAULT, vault), (Tier.PEER, peer if location.peer else 0)):
        far = location.far and tier is Tier.PEER
        speed = remote.speed_of(location.peer) if far else remote.speed(tier)
        if speed is None and (location.handed_over or (far and hopes)):
            speed = HANDED_SPEED
        if depth and speed is not None:
            offers.append(Offer(tier, depth, speed))
    return offers
