"""Blocks of running sequences that go to vaults while they run, so that after a crash little is computed again.

    about once a second:  the sequence whose blocks that no vault has would take longest to compute again
                              ├─ PROTECT_S or less ──▶ nothing: computing that is cheaper than carrying it
                              └─ longer ──▶ as many of its blocks as SHARE of the time since then copies

`choose` is pure; the `Protector` carries it out. The engine's thread owns it, and nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.schedule.sequence import Sequence, SequenceState
from kvfleet.worker.tiers.break_even import SURE
from kvfleet.worker.tiers.host import Copier, HostTier
from kvfleet.worker.tiers.offloader import Chain, Offloader
from kvproto.messages import Tier

if TYPE_CHECKING:
    from kvfleet.worker.tiers.remote import RemoteTiers  # which the engine has without its sockets

PERIOD_S = 1.0
PROTECT_S = 0.25  # of computing
SHARE = 0.05  # of the time that may be spent on these copies
SAVED_UP_S = 10.0  # of time without copies that count for later ones
DOUBT_S = 10.0  # between two times that everything is offered again because a vault may have lost it


class Exposed(NamedTuple):
    """A chain of `end` computed blocks; `on_host` and `vaulted` count its leading blocks there."""

    sequence: Sequence
    end: int
    on_host: int
    vaulted: int


def choose(
    chains: Iterable[Exposed], budget_s: float, *, compute_s: float, copy_s: float, carry_s: float
) -> tuple[Exposed, int, float] | None:
    """The chain to protect next, up to which block, and the seconds that this takes. For one block: `compute_s` to
    compute it, `copy_s` to copy it to the host, `carry_s` from there to a vault or back."""
    worst = max(chains, key=lambda chain: chain.end - chain.vaulted, default=None)
    if worst is None or (worst.end - worst.vaulted) * compute_s <= PROTECT_S:
        return None
    if SURE * carry_s >= compute_s:  # it would not be brought back
        return None
    again_s = max(0, worst.vaulted - worst.on_host) * copy_s  # the host must have what comes before
    each_s = copy_s + carry_s
    blocks = int((budget_s - again_s) / each_s) if each_s else worst.end
    if blocks < 1:
        return None
    end = min(worst.end, worst.vaulted + blocks)
    return worst, end, again_s + (end - worst.vaulted) * each_s


@dataclass(eq=False, slots=True)
class Protector:
    """One chain at a time: the next one is chosen when vaults have answered for the last."""

    pool: BlockPool
    host: HostTier
    offloader: Offloader
    copier: Copier
    remote: RemoteTiers
    protected_total: int = 0  # blocks that vaults were given
    _maintained_at: float = float("-inf")
    _budget_s: float = 0.0
    _on_its_way: tuple[Chain, int] | None = None  # and how much of it vaults had before
    _losses: int = field(init=False)
    _doubted_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._losses = self.remote.losses

    def maintain(self, now: float, sequences: Iterable[Sequence], prefill_tokens_per_s: float) -> None:
        since = now - self._maintained_at
        if since < PERIOD_S:
            return
        self._maintained_at = now
        self._doubt(now)
        speed = self.remote.speed(Tier.VAULT)
        if not prefill_tokens_per_s or speed is None or speed.bytes_per_s <= 0:
            return
        copy_s = self.copier.speed_out.seconds(self.host.block_bytes)
        carry_s = self.host.block_bytes / speed.bytes_per_s
        most_s = max(SHARE * SAVED_UP_S, copy_s + carry_s)  # a block, however slow the way
        self._budget_s = min(self._budget_s + SHARE * since, most_s)
        if not self._arrived():
            return
        compute_s = self.pool.block_size / prefill_tokens_per_s
        chains = [self._exposed(one) for one in sequences if one.started and not one.private]
        chosen = choose(chains, self._budget_s, compute_s=compute_s, copy_s=copy_s, carry_s=carry_s)
        if chosen is None:
            return
        worst, end, seconds = chosen
        self._budget_s -= seconds
        chain = Chain(worst.sequence.root, worst.sequence.hashes, end, worst.vaulted)
        self._on_its_way = chain, worst.vaulted
        self.offloader.offer_chain(chain)

    def _arrived(self) -> bool:
        if self._on_its_way is not None:
            chain, before = self._on_its_way
            if self.offloader.carries(chain.last):
                return False
            self.protected_total += max(0, self.offloader.vaulted(chain.hashes[: chain.end]) - before)
            self._on_its_way = None
        return True

    def _exposed(self, sequence: Sequence) -> Exposed:
        hashes = sequence.hashes
        end = min(sequence.filled, len(hashes))
        on_host = self.host.pool.index.depth(hashes)
        if sequence.state is not SequenceState.RUNNING:  # its blocks are released, but not yet gone
            end = max(self.pool.index.depth(hashes), on_host)
        return Exposed(sequence, end, min(on_host, end), min(self.offloader.vaulted(hashes), end))

    def _doubt(self, now: float) -> None:
        losses = self.remote.losses
        if losses != self._losses and now - self._doubted_at >= DOUBT_S:
            self._losses, self._doubted_at = losses, now
            self.offloader.doubt()
