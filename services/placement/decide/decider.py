"""One decision: the worker of a request, or the region. Pure. It books the load and notes itself in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kvfleet.placement.decide.admission import RecentRefusals, TurnedAway, has_better_to_do, limit_of
from kvfleet.placement.decide.pairing import Pairing
from kvfleet.placement.decide.state import PlacementState
from kvfleet.placement.events import GenerateAsked
from kvfleet.placement.index.prefix_index import Depths, Hashes
from kvfleet.placement.policies import DEFAULT_POLICY, DIRECT, Choice, Policy, Question
from kvfleet.placement.record.ledger import LedgerEntry, consider
from kvfleet.placement.workers import price_kernel as kernel
from kvfleet.placement.workers.bookings import BOOKING_LIMIT_S, WORD_S
from kvfleet.placement.workers.fleet import Ready, Space, Worker
from kvfleet.placement.workers.prompts import NO_HASHES, AddressSpace, Heat, PromptHasher, SharedPrefix
from kvfleet.placement.workers.workloads import PRICED_TIERS, Floats, Workloads
from kvproto.errors import InvalidRequest, ModelNotFound, NoWorkers, Overloaded
from kvproto.hash_ring import ring_key
from kvproto.messages import Booked, Placement, PlaceRequest, Tier

CANNOT_SERVE = (NoWorkers, Overloaded, ModelNotFound)  # here; another region may
LONGEST_S = 1e9  # that an answer can say
SPARE_RETRY_S = 0.25
SHARED_BLOCKS = 512  # of a prompt, told to other replicas as being computed


@dataclass(slots=True)
class Matched:
    """Prompt tokens that each candidate could have, `[4, candidates]`, in the tier or a faster one."""

    indexed: Floats  # by the index
    believed: Floats  # of them, by experience with the worker
    hashes: Hashes  # of the first candidate's address space
    block_size: int
    depth: int  # blocks from the start that any of them has
    spaces: list[tuple[Space, Depths]]  # with the blocks of its workers `[3, workers]`


@dataclass(eq=False, slots=True)
class Decider:
    """Owned by the core. `default` is the policy of requests that name none; raises InvalidRequest if it is unknown."""

    state: PlacementState
    prompts: PromptHasher
    unix_ms: Callable[[], int]
    policies: Mapping[str, Policy]
    default: str
    workloads: Workloads = field(init=False)
    decisions_total: int = 0
    no_worker_total: int = 0
    sourced_total: int = 0  # decisions that name a worker to pull from
    heat: Heat = field(default_factory=Heat)
    turned_away: TurnedAway = field(default_factory=TurnedAway)
    refused: RecentRefusals = field(default_factory=RecentRefusals)
    booked: list[Booked] = field(default_factory=list)  # not yet taken
    pairing: Pairing = field(default_factory=Pairing)

    def __post_init__(self) -> None:
        self.workloads = self.state.fleet.workloads
        self._policy(self.default)

    def take_booked(self) -> tuple[Booked, ...]:
        booked, self.booked = tuple(self.booked), []
        return booked

    def decide(self, tenant: str, ask: PlaceRequest, now: float, *, pairs: bool = True) -> Placement:
        """Choose and book. Raises InvalidRequest, NotFound, ModelNotFound, or NoWorkers or Overloaded (retryable)."""
        policy = self._policy(ask.policy or self.default)
        if not self.state.fleet.is_known(ask.model):
            if self.state.fleet.is_unknown and not self.state.region_summaries.regions.own:  # else others may serve all
                raise NoWorkers("no worker has been seen yet", field="model", retry_after_s=2.0)
            raise ModelNotFound(f"no worker of this fleet has served {ask.model[:64]!r}", field="model")
        ready = self.state.fleet.ready(ask.model)
        excluded = _effective(ask.excluded, ready)
        tokens = self.prompts.tokens(ask)
        if not ready.workers:
            self.refused.note(tenant, ask, tokens, now)
            self._remember(tenant, ask, now)
        if ask.spare and policy.name != DIRECT:
            excluded |= self._without_spare(ask, ready.without(excluded), now)
        if ask.max_wait_s is not None and not ask.attempt and policy.name != DIRECT:
            excluded |= self._too_busy(tenant, ask, ask.max_wait_s, ready.without(excluded), tokens, now)
        every = among = ready.without(excluded)
        has_halves = bool(every.prefillers) and policy.name == DEFAULT_POLICY and ask.max_tokens > 1
        if ask.successor and ask.successor in every.ids and policy.name != DIRECT:
            among = every.only(frozenset({ask.successor}))
        elif has_halves:  # other policies plan no pairs
            among = every.for_decodes
        if among is not every:
            excluded |= every.ids - among.ids
        matched = self._match(tenant, ask, among, tokens)
        next_to_go = self.state.fleet.next_to_go.get(self.state.fleet.base_of(ask.model))
        if next_to_go is not None and policy.name != DIRECT and _is_new_to(next_to_go, among, matched):
            excluded |= {next_to_go}
            among = among.without(frozenset({next_to_go}))
            matched = self._match(tenant, ask, among, tokens)
        question, last_block = self._question(tenant, ask, among, excluded, matched, tokens, now)
        if among is not every:
            self.workloads.rates_like(question.loads, every.columns)
        choice = policy.choose(question)
        if choice is None:
            self.no_worker_total += 1
            raise NoWorkers(f"no worker that serves {ask.model[:64]} is ready", field="model")
        self.pairing.settled((tenant, ask.request))
        then = ""
        if has_halves and pairs and not ask.successor and choice.prices is not None:  # without `pairs` it stays whole
            prompts = every.for_prompts
            found = self._match(tenant, ask, prompts, tokens)
            other, last_there = self._question(tenant, ask, prompts, every.ids - prompts.ids, found, tokens, now)
            self.workloads.rates_like(other.loads, every.columns)
            if (best := policy.choose(other)) and (pair := self.pairing.plan(question, choice, other, best, now)):
                among, matched, question, choice, then = prompts, found, other, pair.choice, pair.then
                last_block = last_there
                self.pairing.note((tenant, ask.request), then, now)
        if last_block is not None:
            self._warm(tenant, ask, among.spaces[0].address, matched.hashes[: matched.depth], now)
        placement = self._settle(tenant, policy.name, choice, question, matched, now)
        return replace(placement, then=then) if then else placement

    def _question(
        self,
        tenant: str,
        ask: PlaceRequest,
        among: Ready,
        excluded: frozenset[str],
        matched: Matched,
        tokens: int,
        now: float,
    ) -> tuple[Question, bytes | None]:
        """And the last block that any of them has."""
        self._bring_up(tenant, ask, among, matched, now)
        loads = self.workloads.view(among.columns, now, priority=ask.priority)
        self.state.returns.foresee(loads, among.workers)
        last_block = matched.hashes[matched.depth - 1].tobytes() if matched.depth else None
        question = Question(
            key=ring_key(tenant, session=ask.session, prompt_ids=ask.prompt_ids, prompt=ask.prompt),
            ask=ask,
            ring=among.ring,
            excluded=excluded,
            candidates=among.workers,
            alive=self.state.fleet.workers,
            loads=loads,
            prompt_tokens=tokens,
            matched=matched.believed,
            heat=self.heat.of(last_block, now) if last_block is not None else 0.0,
            hashes=matched.hashes,
            depth=matched.depth,
        )
        return question, last_block

    def least_wait_s(self, ask: PlaceRequest, now: float) -> float | None:
        """The request's least wait for a start in this region; None: no worker is ready."""
        ready = self.state.fleet.ready(ask.model)
        among = ready.without(_effective(ask.excluded, ready))
        if not among.workers:
            return None
        return float(self.workloads.view(among.columns, now, priority=ask.priority).waits().min())

    def refer(self, tenant: str, ask: PlaceRequest, now: float, *, refused: bool = False) -> Placement | None:
        """The region that should have the request, and the worker here with most of its blocks; None: it stays.
        `refused`: no worker here may take it."""
        regions = self.state.region_summaries
        if not regions.regions.own or ask.policy == DIRECT or ask.worker or ask.spare:
            return None
        wait_s = None if refused else self.least_wait_s(ask, now)
        if wait_s is None and not refused:
            return None  # the decision raises the proper error
        if ask.excluded_regions:
            regions.refused(self._holder(tenant, ask)[2])
        region = regions.refer(ask.model, wait_s, ask.excluded_regions, now)
        if region is None:
            return None
        if not refused:  # else it is counted already; here it is demand that no worker could serve soon
            self.refused.note(tenant, ask, self.prompts.tokens(ask), now)
        source, tokens, hashes = self._holder(tenant, ask)
        regions.trace(hashes, region, now)
        here = f"{wait_s:.1f} s to wait here" if wait_s is not None else "nobody here can take it"
        return Placement(
            ask.request, "", ask.attempt, why=here, placement=self.state.placement, region=region,
            source=source, source_tokens=tokens,
        )  # fmt: skip

    def source_of(self, tenant: str, ask: PlaceRequest) -> Placement:
        """The worker here with most of the prompt, for a worker of another region."""
        source, tokens, _ = self._holder(tenant, ask)
        return Placement(
            ask.request, "", ask.attempt, placement=self.state.placement, source=source, source_tokens=tokens
        )

    def region_for(self, event: GenerateAsked, model: str, max_wait_s: float | None, now: float) -> str | None:
        """The region for a bare producer's request; None: it stays."""
        if not self.state.region_summaries.regions.own:
            return None
        ask, text = event.ask, event.ask.prompt if event.chat is None else event.chat.text
        asked = PlaceRequest(event.request, model, ask.prompt_ids, text, priority=min(ask.priority, 0))
        wait_s = self.least_wait_s(asked, now)
        late = wait_s is not None and max_wait_s is not None and wait_s > limit_of(max_wait_s, asked.priority)
        region = self.state.region_summaries.refer(model, None if late else wait_s, (), now)
        if region is not None:
            self.refused.note(event.tenant, asked, self.prompts.tokens(asked), now)
        return region

    def _holder(self, tenant: str, ask: PlaceRequest) -> tuple[str, int, Hashes]:
        """The worker with most of the prompt on device and host, or ""; its tokens; the prompt's hashes."""
        best, tokens, hashes = "", 0, NO_HASHES
        for space in self.state.fleet.ready(ask.model).spaces:
            chain = self.prompts.hashes(space.address, tenant, ask)
            if not len(chain):
                continue
            hashes = chain if not len(hashes) else hashes
            held = self.state.indexer.depths(chain, space.names)[kernel.HOST] * self.workloads.credits_of(space.columns)
            held[space.groups < 0] = 0.0
            number = int(held.argmax())
            if (found := int(held[number]) * space.address.block_size) > tokens:
                best, tokens = space.names[number], found
        if not len(hashes) and (last := self.state.fleet.spaces.get(ask.model)) is not None:
            hashes = self.prompts.hashes(last, tenant, ask)  # no worker is ready: later prompts may find it there
        return best, tokens, hashes

    def _too_busy(
        self, tenant: str, ask: PlaceRequest, max_wait_s: float, among: Ready, tokens: int, now: float
    ) -> frozenset[str]:
        """Workers where it would wait for too long. Raises Overloaded if those are all."""
        limit_s = limit_of(max_wait_s, ask.priority)
        loads = self.workloads.view(among.columns, now, priority=ask.priority)
        waits = loads.waits()
        late = waits > limit_s
        if len(waits) and late.all():
            turn_s = loads.turn_s(tokens)
            self.refused.note(tenant, ask, tokens, now)
            raise self.turned_away.refuse(ask.model, ask.priority, float(waits.min()), limit_s, turn_s, now)
        return frozenset(among.workers[number].id for number in late.nonzero()[0].tolist())

    def _without_spare(self, ask: PlaceRequest, among: Ready, now: float) -> frozenset[str]:
        """Workers that have something better to do. Raises Overloaded if those are all; that is no demand for more."""
        busy = has_better_to_do(self.workloads.view(among.columns, now, priority=ask.priority + 1))
        if len(busy) and busy.all():
            raise Overloaded(f"no worker of {ask.model[:64]!r} has capacity to spare", retry_after_s=SPARE_RETRY_S)
        return frozenset(among.workers[number].id for number in busy.nonzero()[0].tolist())

    def _remember(self, tenant: str, ask: PlaceRequest, now: float) -> None:
        """What vaults have of a prompt that waits for a first worker is demand: that worker fetches it first."""
        space = self.state.fleet.spaces.get(ask.model)
        if space is None or not ask.prompt_ids:
            return
        hashes = self.prompts.hashes(space, tenant, ask)
        self.state.indexer.depths(hashes, ())
        if not (depth := self.state.indexer.pooled):
            return
        self._warm(tenant, ask, space, hashes[:depth], now)

    def _warm(self, tenant: str, ask: PlaceRequest, space: AddressSpace, hashes: Hashes, now: float) -> None:
        if self.heat.add(last := hashes[-1].tobytes(), now):
            prefix = SharedPrefix(ask.model, space, self.prompts.root(space, tenant, ask), hashes.copy())
            self.heat.keep(last, prefix, now)

    def _settle(
        self, tenant: str, policy: str, choice: Choice, question: Question, matched: Matched, now: float
    ) -> Placement:
        ask, state = question.ask, self.state
        worker = state.fleet.workers[choice.worker]
        number = next((number for number, one in enumerate(question.candidates) if one is worker), None)
        hit: dict[str, int] = {}
        ttft_s, source, source_tokens, promised = None, "", 0, 0
        if number is not None:  # else the request named a worker that is no candidate
            if (priced := choice.prices) is None:
                priced = question.loads.price(question.matched, question.prompt_tokens)
            prices, reach = priced[:, number].tolist(), question.matched[:, number].tolist()
            tokens_from = zip(PRICED_TIERS, (reach[kernel.DEVICE], *prices[kernel.RESTORED :]), strict=True)
            hit = {tier.value: int(tokens) for tier, tokens in tokens_from if tokens >= 1}
            promised = int(matched.indexed[kernel.HOST if Tier.HOST.value in hit else kernel.DEVICE, number])
            if question.prompt_tokens and worker.rates.prefill_tokens_per_s:  # else nothing was measured there
                ttft_s = min(sum(prices[term] for term in kernel.TTFT_TERMS), LONGEST_S)
            untried = not worker.rates.restore_bytes_per_s.get(Tier.PEER.value)  # it may measure what that costs
            if Tier.PEER.value in hit or (untried and reach[kernel.PEER] > reach[kernel.VAULT]):
                source, source_tokens = self._source(worker, matched)
                self.sourced_total += 1
        placement = Placement(
            request=ask.request,
            worker=worker.id,
            attempt=ask.attempt,
            expected_hit=hit,
            expected_ttft_s=ttft_s,
            policy=policy,
            why=choice.why,
            placement=state.placement,
            source=source,
            source_tokens=source_tokens,
            elsewhere=state.region_summaries.elsewhere(
                matched.hashes if ask.reusable is None else NO_HASHES,
                matched.block_size,
                sum(hit.values()),
                worker.rates.prefill_tokens_per_s,
            ),
        )
        feed = question.prompt_tokens - sum(hit.values())
        state.returns.back(tenant, ask.session, feed)
        hashes, block_size = matched.hashes, matched.block_size
        space = worker.spaces[ask.model]
        if not question.candidates or space != question.candidates[0].spaces[ask.model]:
            hashes, block_size = self.prompts.hashes(space, tenant, ask), space.block_size
        silent_s = None if ask.deadline_ms is None else min(ask.deadline_ms / 1000 + WORD_S, BOOKING_LIMIT_S)
        silent_ms = None if silent_s is None else round(silent_s * 1000)
        first = hashes[:SHARED_BLOCKS].tobytes()
        booked = Booked(tenant, ask.request, ask.attempt, worker.id, feed, ask.priority, silent_ms, first)
        for over in state.bookings.book(booked, worker.column, now):
            state.inflight.break_off(over)
        self.booked.append(booked)
        state.inflight.make((tenant, ask.request), worker.id, hashes, now)
        state.ledger.note(
            LedgerEntry(
                tenant=tenant,
                model=ask.model,
                unix_ms=self.unix_ms(),
                placement=placement,
                prompt_tokens=question.prompt_tokens,
                considered=consider(question.candidates, number, choice, matched.believed),
                candidates_total=len(question.candidates),
                promised=promised,
                attainable=int(matched.indexed[-1].max(initial=0)),
                hashes=hashes.tobytes() if state.ledger.keeps_hashes else b"",
                block_size=block_size,
            )
        )
        self.decisions_total += 1
        return placement

    def _match(self, tenant: str, ask: PlaceRequest, among: Ready, tokens: int) -> Matched:
        of_all = len(PRICED_TIERS), len(among.workers)
        indexed, believed = np.zeros(of_all), np.zeros(of_all)
        first, block_size = NO_HASHES, among.spaces[0].address.block_size if among.spaces else 1
        most = float(max(tokens - 1, 0))  # one token is always fed, to draw the first new one from
        if ask.reusable is not None:
            most = min(most, float(ask.reusable))
        asked = []
        for space in among.spaces:
            hashes = self.prompts.hashes(space.address, tenant, ask)
            if not len(hashes):
                continue
            if space is among.spaces[0]:
                first = hashes
            size = float(space.address.block_size)
            depths = self.state.indexer.depths(hashes, space.names)
            asked.append((space, depths))
            credit, pooled = self.workloads.credits_of(space.columns), self.state.indexer.pooled
            alone, shape = len(among.spaces) == 1, (len(PRICED_TIERS), len(space.numbers))
            found, expected = (indexed, believed) if alone else (np.zeros(shape), np.zeros(shape))
            kernel.fill(depths, space.groups, credit, pooled, size, most, found, expected)
            if (coming := self.state.inflight.depths(hashes, space.names)) is not None:
                np.maximum(expected, np.minimum(coming[: len(space.numbers)] * size, most), out=expected)
            if not alone:
                indexed[:, space.numbers], believed[:, space.numbers] = found, expected
        depth = min(int(believed[-1].max(initial=0)) // block_size, len(first))
        return Matched(indexed, believed, first, block_size, depth, asked)

    def _bring_up(self, tenant: str, ask: PlaceRequest, among: Ready, matched: Matched, now: float) -> None:
        """What a conversation's worker restores before its return counts as on its device."""
        if (worker := self.state.returns.brings_up(tenant, ask.session, now)) is None:
            return
        number = next((number for number, one in enumerate(among.workers) if one.id == worker), None)
        if number is not None:
            matched.believed[kernel.DEVICE, number] = matched.believed[kernel.HOST, number]

    def _source(self, worker: Worker, matched: Matched) -> tuple[str, int]:
        """The worker to pull from: with most of the prompt as believed, then with fewest requests; and its tokens."""
        space, depths = next((space, depths) for space, depths in matched.spaces if worker.id in space.names)
        asker = space.names.index(worker.id)
        held = depths[kernel.HOST] * self.workloads.credits_of(space.columns)
        held[(space.groups != space.groups[asker]) | (space.columns == worker.column)] = -1.0
        requests = self.workloads.requests_of(space.columns)
        requests[held < held.max()] = np.inf
        giver = int(requests.argmin())
        return space.names[giver], int(depths[kernel.HOST, giver]) * space.address.block_size

    def _policy(self, name: str) -> Policy:
        if (policy := self.policies.get(name)) is None:
            raise InvalidRequest(f"{name[:64]!r} is none of {', '.join(self.policies)}", field="policy")
        return policy


def _is_new_to(next_to_go: str, among: Ready, matched: Matched) -> bool:
    """Whether the worker that is about to go holds no more of the request than another one."""
    number = next((number for number, worker in enumerate(among.workers) if worker.id == next_to_go), None)
    if number is None or len(among.workers) < 2:
        return False
    own = matched.believed[kernel.HOST]
    return bool(own[number] <= np.delete(own, number).max())


def _effective(excluded: tuple[str, ...], ready: Ready) -> frozenset[str]:
    """All of `excluded` if any worker remains, else its last one, else none."""
    for names in (frozenset(excluded), frozenset(excluded[-1:])):
        if any(worker.id not in names for worker in ready.workers):
            return names
    return frozenset()
