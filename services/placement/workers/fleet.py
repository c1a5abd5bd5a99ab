"""The workers that are alive, ready ones and the ring per model, and their load. Pure.

Events come in the order of the members view, so ready set and ring equal those of every Client of the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kvfleet.placement.workers.feedback import Experience
from kvfleet.placement.workers.heard_demand import HeardDemand
from kvfleet.placement.workers.prompts import AddressSpace, address_spaces
from kvfleet.placement.workers.workloads import Columns, Workloads
from kvproto.hash_ring import HashRing
from kvproto.ids import model_token
from kvproto.messages import Heartbeat, Load, Milestone, Milestones, Rates, State, WorkerRecord, WorkerRole

MAX_MODELS = 4096  # names remembered, living or not
SILENT_AFTER_S = 1.5  # three heartbeats missed
PING_AGAIN_S = 0.5
GAPS_KEPT = 64  # newest ones; an outage makes a gap


@dataclass(slots=True)
class SeenMilestones:
    """The heard milestones of one life: after an outage a worker sends the last ones again."""

    next: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)  # [begin, end) of what was not heard, below `next`

    def new_of(self, said: Milestones) -> Milestones:
        """Milestones not heard before; all of a worker that does not number them."""
        first = said.first
        if first is None:
            return said
        end, gaps = first + len(said.items), []
        fresh: list[Milestone] = []
        for a, b in (*self.gaps, (self.next, max(end, self.next))):
            low, high = max(a, first), min(b, end)
            if low >= high:
                gaps.append((a, b))
                continue
            fresh += said.items[low - first : high - first]
            gaps += [(a, low), (high, b)]
        self.next = max(self.next, end)
        self.gaps = [(a, b) for a, b in gaps if a < b][-GAPS_KEPT:]
        return replace(said, items=tuple(fresh))


@dataclass(slots=True)
class Worker:
    id: str
    epoch: str
    model: str
    state: State
    heard_at: float  # its last sign of life, in our monotonic seconds
    spaces: dict[str, AddressSpace]  # by the names that it serves: its model's, and of adapters
    column: int  # of the workloads
    kv_format: bytes = b""  # of the blocks that it exchanges with others; b"": none
    attaches: bool = False  # an attempt there may have several readers
    role: WorkerRole | None = None  # None: an older version
    load: Load = field(default_factory=Load)
    rates: Rates = field(default_factory=Rates)
    milestones: SeenMilestones = field(default_factory=SeenMilestones)
    demand: HeardDemand = field(default_factory=HeardDemand)
    experience: Experience = field(default_factory=Experience)
    pinged_at: float = -1e9
    pauses: bool = False  # it follows ReturnExpected


@dataclass(frozen=True, slots=True)
class Space:
    """Ready workers that address blocks alike."""

    address: AddressSpace
    numbers: Columns  # their places among the ready workers
    names: tuple[str, ...]  # theirs, and after them those of others that only give blocks
    columns: Columns  # as the names
    groups: Columns  # as the names: equal numbers can pull from one another, -1 cannot


@dataclass(frozen=True)
class Ready:
    """The ready workers of one model, by id, and the plain ring over them; `givers` only give blocks: draining workers,
    and those of the other role. An adapter is a model of those that have it."""

    model: str
    workers: tuple[Worker, ...]
    ring: HashRing
    columns: Columns  # of the workers, in their order
    spaces: tuple[Space, ...]
    givers: tuple[Worker, ...] = ()
    prefillers: frozenset[str] = frozenset()  # for prompts alone, whose blocks others can have; none where all are

    @staticmethod
    def of(model: str, workers: Iterable[Worker], ring: HashRing, giving: Iterable[Worker] = ()) -> Ready:
        listed, givers = tuple(workers), tuple(giving)
        numbers_of: dict[AddressSpace, list[int]] = {}
        for number, worker in enumerate(listed):
            numbers_of.setdefault(worker.spaces[model], []).append(number)
        spaces = []
        for space, numbers in numbers_of.items():
            alike = [listed[number] for number in numbers]
            alike += [giver for giver in givers if giver.spaces[model] == space]
            formats = {kv_format: group for group, kv_format in enumerate(sorted({w.kv_format for w in alike} - {b""}))}
            groups = np.array([formats.get(worker.kv_format, -1) for worker in alike], dtype=np.int64)
            names = tuple(worker.id for worker in alike)
            spaces.append(Space(space, np.array(numbers), names, _columns(alike), groups))
        prompts = frozenset(w.id for w in listed if w.role is WorkerRole.PREFILL and w.kv_format)
        prefillers = prompts if len(prompts) < len(listed) else frozenset()
        return Ready(model, listed, ring, _columns(listed), tuple(spaces), givers, prefillers)

    def without(self, excluded: frozenset[str]) -> Ready:
        """The others; the ring stays that of all."""
        if not excluded:
            return self
        kept = [[w for w in workers if w.id not in excluded] for workers in (self.workers, self.givers)]
        return Ready.of(self.model, kept[0], self.ring, kept[1])

    def only(self, kept: frozenset[str]) -> Ready:
        """These workers; the others give blocks."""
        given = tuple(worker for worker in self.workers if worker.id not in kept)
        return Ready.of(self.model, (w for w in self.workers if w.id in kept), self.ring, (*given, *self.givers))

    @cached_property
    def ids(self) -> frozenset[str]:
        return frozenset(worker.id for worker in self.workers)

    @cached_property
    def for_decodes(self) -> Ready:
        return self.only(self.ids - self.prefillers)

    @cached_property
    def for_prompts(self) -> Ready:
        return self.only(self.prefillers)


class Fleet:
    """Owned by the core."""

    def __init__(self, workloads: Workloads) -> None:
        self.workloads = workloads
        self.workers: dict[str, Worker] = {}
        self.next_to_go: dict[str, str] = {}  # by model: its worker about to be removed, which gets nothing new
        self._names: dict[str, str] = {}  # subject token -> model, of every model ever seen alive
        self._bases: dict[str, str] = {}  # by adapter: the model that it is of
        self._ready: dict[str, Ready] = {}
        self.spaces: dict[str, AddressSpace] = {}  # by model, when a worker was last ready
        self._rings: dict[str, HashRing] = {}  # by model, when a worker was last ready

    def _join(self, record: WorkerRecord, heartbeat: Heartbeat | None, now: float) -> None:
        before = self.workers.get(record.id)
        self.leave(record.id)
        column = self.workloads.add(_token_bytes(record), record.block_size, now)
        worker = Worker(
            record.id, record.epoch, record.model, record.state, now, address_spaces(record), column,
            _exchange_format(record), record.attaches, record.role, pauses=record.pauses,
        )  # fmt: skip
        if heartbeat is not None and heartbeat.epoch == record.epoch:
            worker.load, worker.rates = heartbeat.load, heartbeat.rates
            self.workloads.report(column, heartbeat.load, heartbeat.rates, (), now)
        self.workers[record.id] = worker
        self._serve(worker, worker.spaces)
        self._forget_adapters(before.spaces.keys() if before is not None else ())

    def register(self, record: WorkerRecord, heartbeat: Heartbeat | None, now: float) -> bool:
        """Returns whether it has joined: for the first time, as another life, or with another model."""
        worker = self.workers.get(record.id)
        spaces = address_spaces(record)
        told = record.epoch, record.model, spaces[record.model]
        if worker is None or (worker.epoch, worker.model, worker.spaces[worker.model]) != told:
            self._join(record, heartbeat, now)
            return True
        worker.heard_at, worker.attaches, worker.pauses = now, record.attaches, record.pauses
        if worker.role is not record.role:
            worker.role = record.role
            self._changed(worker)
        if worker.spaces != spaces:
            self._serve(worker, spaces)
        self.workloads.weigh(worker.column, _token_bytes(record))  # known once its model is loaded
        if worker.kv_format != _exchange_format(record):
            worker.kv_format = _exchange_format(record)
            self._changed(worker)
        self._set_state(worker, record.state)
        return False

    def leave(self, worker: str) -> None:
        if (gone := self.workers.pop(worker, None)) is not None:
            self.workloads.drop(gone.column)
            self._changed(gone)

    def beat(self, beat: Heartbeat, now: float) -> bool:
        """Returns whether the heartbeat is of a living worker's present life; others are ignored."""
        worker = self.workers.get(beat.worker)
        if worker is None or worker.epoch != beat.epoch:
            return False
        worker.heard_at, worker.load, worker.rates = now, beat.load, beat.rates
        worker.demand.hear(beat.load, now)
        self._set_state(worker, beat.state)
        return True

    def claim_ping(self, worker: Worker, now: float, *, suspected: bool = False) -> bool:
        """Returns whether to ask this silent or suspected worker for a sign of life now."""
        silent = suspected or now - worker.heard_at > SILENT_AFTER_S
        if not silent or now - worker.pinged_at < PING_AGAIN_S:
            return False
        worker.pinged_at = now
        return True

    def ready(self, model: str) -> Ready:
        """Workers of `model` that take new work; empty for an unknown model."""
        found = self._ready.get(model)
        if found is None:
            here = [w for w in self.workers.values() if model in w.spaces]
            workers = sorted((w for w in here if w.state is State.READY), key=lambda w: w.id)
            if not workers:
                return Ready.of(model, (), HashRing())  # requests' invented names must not fill the cache
            ring = self._rings[model] = self._rings.get(model, HashRing()).with_nodes(w.id for w in workers)
            self.spaces[model] = workers[0].spaces[model]
            draining = [w for w in here if w.state is State.DRAINING]
            found = self._ready[model] = Ready.of(model, workers, ring, draining)
        return found

    def build_rings(self) -> None:
        """Build changed ones, so that no decision waits for it."""
        for model in self._living() - self._ready.keys():
            self.ready(model)

    def attaches(self, worker: str) -> bool:
        """Whether an attempt there may have a second reader: workers of an older version know one alone."""
        return (known := self.workers.get(worker)) is not None and known.attaches

    def is_known(self, model: str) -> bool:
        """Whether a worker of this model was ever seen alive, or one has the adapter or went with it."""
        return self._names.get(model_token(model)) == model

    @property
    def is_unknown(self) -> bool:
        """No worker was ever seen: this replica is new, or all had lost their leases when it came."""
        return not self._names

    def base_of(self, model: str) -> str:
        """The model that an adapter is of; any other is its own."""
        return self._bases.get(model, model)

    def name_of(self, token: str) -> str | None:
        return self._names.get(token)

    def _set_state(self, worker: Worker, state: State) -> None:
        if worker.state is not state:
            worker.state = state
            self._changed(worker)

    def _serve(self, worker: Worker, spaces: dict[str, AddressSpace]) -> None:
        """It serves these from now on."""
        self._changed(worker)
        before, worker.spaces = worker.spaces, spaces
        self._changed(worker)
        for name in spaces:
            self.learn_name(name)
            if name != worker.model:
                self._bases[name] = worker.model
        self._forget_adapters(before)

    def _forget_adapters(self, names: Iterable[str]) -> None:
        """One that was unloaded everywhere is no model of this fleet any more."""
        for name in (set(names) & self._bases.keys()) - self._living():
            self._forget_name(model_token(name))

    def _changed(self, worker: Worker) -> None:
        for model in worker.spaces:
            self._ready.pop(model, None)

    def _living(self) -> set[str]:
        return {model for worker in self.workers.values() for model in worker.spaces}

    def _forget_name(self, token: str) -> None:
        if (name := self._names.pop(token, None)) is not None:
            for by_model in (self._rings, self.spaces, self._bases):
                by_model.pop(name, None)

    def learn_name(self, model: str) -> None:
        """Note a model of this fleet, with or without workers."""
        self._names.setdefault(model_token(model), model)
        if len(self._names) > MAX_MODELS:
            living = {model_token(name) for name in self._living()}
            if (stale := next((token for token in self._names if token not in living), None)) is not None:
                self._forget_name(stale)

    def of_model(self, model: str) -> list[Worker]:
        """The living workers of a model, or with "" of all, by id."""
        return sorted((w for w in self.workers.values() if model in ("", *w.spaces)), key=lambda w: w.id)

    def check_integrity(self) -> None:
        for model, cached in self._ready.items():
            now = sorted(w.id for w in self.workers.values() if model in w.spaces and w.state is State.READY)
            assert [w.id for w in cached.workers] == now == list(cached.ring.nodes), model
            assert all(self.workers[w.id] is w for w in cached.workers), model
        assert all(map(self.is_known, self._living())) or len(self._names) >= MAX_MODELS
        assert self._bases.keys() <= {*self._names.values()}


def _columns(workers: Iterable[Worker]) -> Columns:
    return np.array([worker.column for worker in workers], dtype=np.int64)


def _token_bytes(record: WorkerRecord) -> float:
    """Of K and V; 0 while the worker is loading."""
    return record.block_bytes / max(1, record.block_size)


def _exchange_format(record: WorkerRecord) -> bytes:
    """The format of its blocks' bytes, if others can reach them."""
    return record.kv_format if record.data_plane else b""


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """How busy a worker is and what its cache is worth, under the names that readers of NVIDIA Dynamo know."""

    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0  # held by running sequences
    kv_total_blocks: int = 0
    num_requests_waiting: int = 0
    gpu_cache_usage_perc: float = 0.0  # active of total blocks
    gpu_prefix_cache_hit_rate: float = 0.0  # of the last minute's prompt tokens; 0 if there were none


def metrics_of(worker: Worker, booked: int) -> WorkerMetrics:
    """All 0 for one that was not heard of. `booked`: requests that its heartbeats cannot count yet."""
    if not worker.demand.hits:
        return WorkerMetrics()
    load, (_, prompt, hit) = worker.load, worker.demand.hits[0]
    seated = min(booked, max(load.slots - load.running - load.waiting, 0))  # the others will have to wait
    return WorkerMetrics(
        request_active_slots=load.running + seated,
        request_total_slots=load.slots,
        kv_active_blocks=load.blocks_used,
        kv_total_blocks=load.blocks_total,
        num_requests_waiting=load.waiting + booked - seated,
        gpu_cache_usage_perc=_share(load.blocks_used, load.blocks_total),
        gpu_prefix_cache_hit_rate=_share(load.hit_tokens_total - hit, load.prompt_tokens_total - prompt),
    )


def _share(part: int, whole: int) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0
