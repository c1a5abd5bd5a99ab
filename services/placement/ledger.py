"""The last decisions: who was considered at what cost, who was chosen, and what really happened. Pure.

attained    prompt tokens that were really found in a cache
attainable  what the best candidate had of the prompt when it was placed
lost        attainable but not attained, request by request
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvproto.messages import Candidate, Decision, Milestone, Passed, Placement, PlaceRequest
from services.placement.fleet import Worker
from services.placement.index.prefix_index import Hashes
from services.placement.policies import Choice
from services.placement.workloads import TIERS, Floats

KEPT = 4096
CANDIDATES_KEPT = 8

Key = tuple[str, str]  # tenant, request


@dataclass(slots=True)
class Entry:
    """One decision as it is kept: written out only when somebody asks."""

    decision: Decision
    indexed: dict[str, int]  # by tier, what the index said, believed or not
    attainable: int
    hashes: bytes  # of the prompt's blocks, back to back; only where the ledger keeps them
    block_size: int


@dataclass(slots=True)
class HitTokens:
    """Counters, in prompt tokens, of requests that started."""

    prompt_total: int = 0
    attained_total: int = 0
    attainable_total: int = 0
    lost_total: int = 0


class Ledger:
    """Owned by the core. `unix_ms` tells the time that people read; hashes are kept only for a ledger's file."""

    def __init__(
        self, placement: str, unix_ms: Callable[[], int], *, kept: int = KEPT, keeps_hashes: bool = False
    ) -> None:
        self.keeps_hashes = keeps_hashes
        self.hits = HitTokens()
        self._placement = placement
        self._unix_ms = unix_ms
        self._kept = kept
        self._entries: OrderedDict[tuple[str, str, int], Entry] = OrderedDict()
        self._attempts: dict[Key, list[int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def note(
        self,
        tenant: str,
        ask: PlaceRequest,
        placement: Placement,
        *,
        prompt_tokens: int,
        indexed: dict[str, int],
        attainable: int,
        candidates: tuple[Candidate, ...],
        candidates_total: int,
        hashes: Hashes,
        block_size: int,
    ) -> None:
        decision = Decision(
            request=ask.request,
            attempt=ask.attempt,
            tenant=tenant,
            model=ask.model,
            unix_ms=self._unix_ms(),
            policy=placement.policy,
            worker=placement.worker,
            why=placement.why,
            prompt_tokens=prompt_tokens,
            expected_hit=placement.expected_hit,
            expected_ttft_s=placement.expected_ttft_s,
            candidates=candidates,
            candidates_total=candidates_total,
            placement=self._placement,
        )
        key = tenant, ask.request, ask.attempt
        if key not in self._entries:
            self._attempts.setdefault(key[:2], []).append(ask.attempt)
        self._entries.pop(key, None)
        self._entries[key] = Entry(
            decision, indexed, attainable, hashes.tobytes() if self.keeps_hashes else b"", block_size
        )
        while len(self._entries) > self._kept:
            self._forget_oldest()

    def on_milestone(self, worker: str, milestone: Milestone) -> Entry | None:
        """What happened to a decision of this replica: its entry, else None."""
        entry = self._entries.get((milestone.tenant, milestone.request, milestone.attempt))
        if entry is None or entry.decision.worker != worker:
            return None
        before = entry.decision.actual
        match milestone.passed:
            case Passed.ACCEPTED:
                actual = replace(before, accepted=True)
            case Passed.STARTED:
                actual = replace(before, accepted=True, cached=milestone.cached, queue_s=milestone.seconds)
                if before.cached is None:
                    self._count(entry, milestone)
            case Passed.FIRST_TOKEN:
                actual = replace(before, ttft_s=milestone.seconds)
            case Passed.ENDED:
                actual = replace(before, ended=True, output_tokens=milestone.output_tokens, code=milestone.code)
        entry.decision = replace(entry.decision, actual=actual)
        return entry

    def explain(self, request: str, tenant: str | None = None) -> tuple[Decision, ...]:
        """Decisions about a request, one per attempt, oldest first."""
        keys = [(tenant, request)] if tenant is not None else [key for key in self._attempts if key[1] == request]
        return tuple(self._entries[*key, attempt].decision for key in keys for attempt in self._attempts.get(key, ()))

    def _count(self, entry: Entry, started: Milestone) -> None:
        attained = sum(started.cached.values())
        hits = self.hits
        hits.prompt_total += started.prompt_tokens
        hits.attained_total += attained
        hits.attainable_total += max(entry.attainable, attained)
        hits.lost_total += max(entry.attainable - attained, 0)

    def _forget_oldest(self) -> None:
        (tenant, request, attempt), _ = self._entries.popitem(last=False)
        attempts = self._attempts[tenant, request]
        attempts.remove(attempt)
        if not attempts:
            del self._attempts[tenant, request]

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        listed = {(*key, attempt) for key, attempts in self._attempts.items() for attempt in attempts}
        assert listed == set(self._entries)
        assert len(self._entries) <= self._kept


def best_candidates(workers: Sequence[Worker], choice: Choice, matched: Floats) -> tuple[Candidate, ...]:
    """The cheapest few, cheapest first, the chosen one among them."""
    if not workers:
        return ()
    names = list(choice.terms)
    terms = np.stack([choice.terms[name] for name in names]) if names else np.zeros((0, len(workers)))
    costs = terms.sum(axis=0)
    order = np.argsort(costs, kind="stable")[:CANDIDATES_KEPT].tolist()
    if not any(workers[number].id == choice.worker for number in order):
        order[-1:] = [number for number, worker in enumerate(workers) if worker.id == choice.worker] or order[-1:]
    listed = (terms[:, order] * 1000).round(3).T.tolist()
    sums = (costs[order] * 1000).round(3).tolist()
    own = np.diff(np.trunc(matched[:, order]), axis=0, prepend=0).T.tolist()  # in a tier beyond what faster ones have
    return tuple(
        Candidate(
            workers[number].id,
            cost,
            dict(zip(names, row, strict=True)),
            {tier.value: int(tokens) for tier, tokens in zip(TIERS, held, strict=True) if tokens},
        )
        for number, cost, row, held in zip(order, sums, listed, own, strict=True)
    )
