"""What to fetch and what to compute: the cheapest mixture, from measured figures. Pure.

    device ──hit──▶ | host ──▶ | vault ──▶ | peer ──▶ | computed
                    start                                       end

Restoring k more blocks and computing the rest costs `latency + k * bytes / rate + what the rest takes to compute`.
Within one tier that grows or falls all the way, so the ends of tiers are the only candidates. The same reasoning prices
workers in placement (`price_kernel`), from the same measurements, which heartbeats carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvfleet.worker.blocks.chain_location import ChainLocation
from kvfleet.worker.schedule.sequence import Sequence as EngineSequence
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.link_speed import LinkSpeed
from kvproto.messages import Tier

if TYPE_CHECKING:
    from kvfleet.worker.tiers.remote import RemoteTiers  # which the engine has without its sockets

SURE = 1.5  # times the predicted seconds of a restore, before it counts as quicker
LATE = 1.5  # a restore's deadline: times its predicted seconds,
SLACK = 0.2  # and that part of the seconds of computing
HANDLING_S = 0.002  # of a restore, beside the transfer
LOOK_WORTH_S = 0.02  # of computing: less is not worth a question
ANSWER_LIMIT_S = 0.03
LOOK_SHARE = 0.01  # of the seconds of computing, that a question may take where that is longer
ANSWER_SLACK_S = 0.2  # beyond a look that is given longer than usual
HANDED_LOOK_S = 2.0  # long, as a busy source may have to be connected to first; one that refuses ends the look sooner
HANDED_BLOCK_S = 0.25  # of computing, that each block of what was handed over counts as more
HANDED_SPEED = LinkSpeed(0.01, 1e9)  # of a peer, or vaults, that were never measured
FAR_LOOK_S = 1.0  # a peer in another region may have to be connected to, and measured, first
FAR_WORTH_S = 0.3  # of computing: less is not worth a question to another region

ComputeSeconds = Callable[[int, int], float]  # to compute blocks from the first number to the second


class Offer(NamedTuple):
    tier: Tier
    end: int
    speed: LinkSpeed


class RestoredPart(NamedTuple):
    tier: Tier
    start: int
    end: int
    seconds: float


def cheapest(offers: Sequence[Offer], start: int, *, block_bytes: int, compute_s: ComputeSeconds) -> list[RestoredPart]:
    """Parts to restore, in the order of the chain; empty if computing everything costs less. `start`: blocks on the
    device. `offers`: fastest tier first."""
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


def going_on_s(missing: int, arrived: int, elapsed_s: float, *, block_s: float) -> float:
    """For how long a late restore goes on; 0.0 unless its missing blocks come, at the pace so far, well before they
    could be computed."""
    if not arrived or 2 * elapsed_s / arrived >= block_s:
        return 0.0
    return LATE * missing * elapsed_s / arrived


def location_of(sequence: EngineSequence) -> ChainLocation | None:
    location = sequence.spec.location
    if location is None or not location.names or sequence.start or location.names[0].hash != sequence.hashes[0]:
        return None
    return location


def price_of_computing(location: ChainLocation | None, compute_s: ComputeSeconds) -> ComputeSeconds:
    """What was handed over counts as dear to compute."""
    if location is None or not location.handed_over:
        return compute_s
    return lambda start, end: compute_s(start, end) + HANDED_BLOCK_S * max(0, end - start)


def look_limit_s(compute_s: float, usual_s: float) -> float | None:
    """That a question may take which may save `compute_s`; None: as usual."""
    share_s = min(LOOK_SHARE * compute_s, FAR_LOOK_S)
    return share_s if share_s > usual_s else None


def answer_limit_s(location: ChainLocation) -> float:
    return ANSWER_LIMIT_S if location.look_s is None else location.look_s + ANSWER_SLACK_S


def host_offers(host: HostTier, bytes_per_s: float, sequence: EngineSequence, start: int, usable: int) -> list[Offer]:
    if not bytes_per_s:
        return []
    depth = host.depth(sequence.hashes, start, usable, exact=sequence.spec.exact)
    return [Offer(Tier.HOST, depth, LinkSpeed(0.0, bytes_per_s))]


def remote_offers(
    remote: RemoteTiers, location: ChainLocation, vault: int, peer: int, *, hopes: bool = False
) -> list[Offer]:
    """`vault`, `peer`: how many blocks they have. `hopes`: a peer that is being measured may turn out to be fast."""
    offers = []
    for tier, depth in ((Tier.VAULT, vault), (Tier.PEER, peer if location.peer else 0)):
        far = location.far and tier is Tier.PEER
        speed = remote.speed_of(location.peer) if far else remote.speed(tier)
        if speed is None and (location.handed_over or (far and hopes)):
            speed = HANDED_SPEED
        if depth and speed is not None:
            offers.append(Offer(tier, depth, speed))
    return offers
