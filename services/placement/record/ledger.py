"""The last decisions: the candidates with their costs, the choice, and what really happened. Pure.

attained    prompt tokens that were really found in a cache
attainable  those that the best candidate had when it was placed
lost        attainable but not attained, request by request
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from kvfleet.placement.policies import Choice
from kvfleet.placement.workers.fleet import Worker
from kvfleet.placement.workers.price_kernel import COST, TERMS
from kvfleet.placement.workers.workloads import PRICED_TIERS, Floats
from kvproto.messages import Actual, Candidate, Decision, Milestone, Passed, Placement

KEPT = 4096
KEPT_IN_ALL = 16_384  # with those that have not ended; large fleets have more
KEPT_PER_WORKER = 96  # requests in 64 slots, and half as many that wait
CANDIDATES_KEPT = 8
ATTEMPTS_KEPT = 16  # of one request: one answer holds them all
PART = 4  # decisions written out at a time: each takes about a tenth of a millisecond
PART_SEEN = 512  # entries looked at for them

NOTHING_YET = Actual()
OF_PLACEMENT = {one.name for one in fields(Decision)} & {one.name for one in fields(Placement)}
TIER_NAMES = tuple(tier.value for tier in PRICED_TIERS)

Key = tuple[str, str]  # tenant, request


@dataclass(frozen=True, slots=True)
class Considered:
    """The best candidates, cheapest first, with their columns of `Choice.prices` and `Question.matched`."""

    workers: tuple[str, ...]
    prices: Floats | None
    matched: Floats

    def listed(self) -> tuple[Candidate, ...]:
        rows = [[]] * len(self.workers) if self.prices is None else (self.prices[:COST] * 1000).round(3).T.tolist()
        names = () if self.prices is None else TERMS
        return tuple(
            Candidate(worker, round(sum(row), 3), dict(zip(names, row, strict=True)), by_tier(held))
            for worker, row, held in zip(self.workers, rows, self.matched.T.tolist(), strict=True)
        )


@dataclass(slots=True)
class LedgerEntry:
    """One decision as it is kept; a question writes it out."""

    tenant: str
    model: str
    unix_ms: int
    placement: Placement
    prompt_tokens: int
    considered: Considered
    candidates_total: int
    promised: int  # tokens that its worker's own device and host should have, believed or not
    attainable: int
    hashes: bytes  # of the prompt's blocks, back to back; only where the ledger keeps them
    block_size: int
    actual: Actual = NOTHING_YET

    def decision(self) -> Decision:
        return Decision(
            tenant=self.tenant,
            model=self.model,
            unix_ms=self.unix_ms,
            prompt_tokens=self.prompt_tokens,
            candidates=self.considered.listed(),
            candidates_total=self.candidates_total,
            actual=self.actual,
            **{name: getattr(self.placement, name) for name in OF_PLACEMENT},
        )


@dataclass(slots=True)
class HitTokens:
    """Counters, in prompt tokens, of requests that started."""

    prompt_total: int = 0
    attained_total: int = 0
    attainable_total: int = 0
    lost_total: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Ledger:
    """Owned by the core. Hashes are kept only for a ledger's file."""

    kept_in_all: int = KEPT_IN_ALL
    keeps_hashes: bool = False
    hits: HitTokens = field(default_factory=HitTokens)
    saved_s_total: float = 0.0  # of restoring, done while conversations paused
    entries: OrderedDict[tuple[str, str, int], LedgerEntry] = field(default_factory=OrderedDict)
    ended: OrderedDict[tuple[str, str, int], None] = field(default_factory=OrderedDict)  # first ended first
    attempts: dict[Key, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.entries)

    def note(self, entry: LedgerEntry) -> None:
        placement = entry.placement
        key = entry.tenant, placement.request, placement.attempt
        if self.entries.pop(key, None) is None:
            self.attempts.setdefault(key[:2], []).append(placement.attempt)
        self.ended.pop(key, None)
        self.entries[key] = entry
        if len(attempts := self.attempts[key[:2]]) > ATTEMPTS_KEPT:
            self._forget((*key[:2], attempts[0]))
        while len(self.entries) > self.kept_in_all:  # of those that have ended nothing more is to come
            self._forget(next(iter(self.ended or self.entries)))

    def on_milestone(self, worker: str, milestone: Milestone) -> LedgerEntry | None:
        """Note what happened; returns the entry if this replica decided."""
        entry = self.entries.get((milestone.tenant, milestone.request, milestone.attempt))
        if entry is None or entry.placement.worker != worker:
            return None
        before = entry.actual
        match milestone.passed:
            case Passed.ACCEPTED:
                entry.actual = replace(before, accepted=True)
            case Passed.STARTED:
                entry.actual = replace(
                    before,
                    accepted=True,
                    cached=milestone.cached,
                    queue_s=milestone.seconds,
                    saved_s=milestone.saved_s,
                )
                if before.cached is None:
                    self._count(entry, milestone)
            case Passed.FIRST_TOKEN:
                entry.actual = replace(before, ttft_s=milestone.seconds)
            case Passed.ENDED:
                entry.actual = replace(
                    before,
                    ended=True,
                    output_tokens=milestone.output_tokens,
                    code=milestone.code,
                    total_s=milestone.seconds,
                )
                self.ended[milestone.tenant, milestone.request, milestone.attempt] = None
                while len(self.ended) > KEPT:
                    self._forget(next(iter(self.ended)))
        return entry

    def explain(self, request: str, tenant: str | None = None) -> tuple[Decision, ...]:
        """Decisions, one per attempt, oldest first; without a tenant, the last ATTEMPTS_KEPT of any with that id."""
        keys = [(tenant, request)] if tenant is not None else [key for key in self.attempts if key[1] == request]
        found = [self.entries[*key, attempt] for key in keys for attempt in self.attempts.get(key, ())]
        return tuple(entry.decision() for entry in found[-ATTEMPTS_KEPT:])

    def newest(
        self, limit: int, tenant: str | None = None, model: str | None = None
    ) -> Iterator[tuple[tuple[Decision, ...], bool]]:
        """The last decisions, newest first, of this tenant and model if they are given: a few at a time, perhaps none,
        as all take longer than a decision may; and whether there may be more."""
        entries, at, more = tuple(reversed(self.entries.values())), 0, True
        while more:
            found: list[Decision] = []
            end = min(at + PART_SEEN, len(entries))
            while limit and at < end and len(found) < PART:
                entry = entries[at]
                at += 1
                if tenant in (None, entry.tenant) and model in (None, entry.model):
                    found.append(entry.decision())
                    limit -= 1
            more = limit > 0 and at < len(entries)
            yield tuple(found), more

    def _count(self, entry: LedgerEntry, started: Milestone) -> None:
        self.saved_s_total += started.saved_s
        attained = min(sum(started.cached.values()), started.prompt_tokens, entry.prompt_tokens)
        hits = self.hits
        hits.prompt_total += min(started.prompt_tokens, entry.prompt_tokens)
        hits.attained_total += attained
        hits.attainable_total += max(entry.attainable, attained)
        hits.lost_total += max(entry.attainable - attained, 0)

    def _forget(self, key: tuple[str, str, int]) -> None:
        del self.entries[key]
        self.ended.pop(key, None)
        attempts = self.attempts[key[:2]]
        attempts.remove(key[2])
        if not attempts:
            del self.attempts[key[:2]]

    def check_integrity(self) -> None:
        listed = {(*key, attempt) for key, attempts in self.attempts.items() for attempt in attempts}
        assert listed == set(self.entries)
        assert set(self.ended) == {key for key, entry in self.entries.items() if entry.actual.ended}
        assert len(self.ended) <= KEPT
        assert max(map(len, self.attempts.values()), default=0) <= ATTEMPTS_KEPT
        assert len(self.entries) <= self.kept_in_all


def kept_in_all(workers: int) -> int:
    return max(KEPT_IN_ALL, KEPT + KEPT_PER_WORKER * workers)


def by_tier(matched: Sequence[float]) -> dict[str, int]:
    """Tokens in each tier, beyond what faster ones have, from those in each tier or a faster one."""
    found, faster = {}, 0
    for name, depth in zip(TIER_NAMES, matched, strict=True):
        if depth > faster:
            found[name] = int(depth) - faster
            faster = int(depth)
    return found


def consider(workers: Sequence[Worker], chosen: int | None, choice: Choice, matched: Floats) -> Considered:
    """The cheapest few candidates of a choice, cheapest first, and the number `chosen` among them."""
    prices = choice.prices
    if prices is None or not len(workers):
        kept = [] if chosen is None else [chosen]
        return Considered(tuple(workers[number].id for number in kept), None, matched[:, kept])
    order = prices[COST].argsort(kind="stable")[:CANDIDATES_KEPT]
    listed = order.tolist()
    if chosen is not None and chosen not in listed:
        order[-1] = listed[-1] = chosen
    return Considered(
        tuple([workers[number].id for number in listed]), prices.take(order, axis=1), matched.take(order, axis=1)
    )
