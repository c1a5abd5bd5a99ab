"""Loop: the models this ingress can serve: tokenizer, template and defaults, fetched from living workers of any region.
A worker's record has the content hash of its bundle; each hash is fetched once, by the first request that needs it or
as soon as its worker joins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from kvfleet.ingress.prompts.tokenizer import ModelTokenizer
from kvproto import codec
from kvproto.client import Client
from kvproto.connection import Connection, Message, Subscription
from kvproto.errors import CodecError, InvalidRequest, KvfleetError, ModelNotFound, NoWorkers, Unavailable
from kvproto.fleet_view import Change, FleetView, WorkerView
from kvproto.messages import Bundle, RegionSummary, State, WorkerRecord
from kvproto.regions import Regions
from kvproto.subjects import Subjects
from kvproto.tasks import end

log = logging.getLogger(__name__)

KEPT_UNNAMED = 4  # bundles of models that left and may come back


@dataclass(eq=False, slots=True)
class OtherRegions:
    """What other regions serve, as their placements say once a second; without a region of its own it hears none.
    Owned by the event loop. `on_change` is called after each summary of another region."""

    connection: Connection
    subjects: Subjects
    now: Callable[[], float]
    on_change: Callable[[], None] = lambda: None
    subscription: Subscription | None = None
    regions: Regions = field(init=False)

    def __post_init__(self) -> None:
        self.regions = Regions(self.subjects.region)

    async def start(self) -> None:
        if self.subjects.region:
            self.subscription = await self.connection.subscribe(self.subjects.region_summaries(), self._on_summary)

    async def stop(self) -> None:
        if self.subscription is not None:
            try:
                await self.subscription.unsubscribe()
            except KvfleetError as error:  # the connection may be gone: nothing to let go of then
                log.debug("other regions: %s", error)

    def records(self) -> dict[str, WorkerRecord]:
        """One for each model that some other region serves now."""
        return self.regions.records(self.now())

    def holders(self, model: str, bundle: str) -> list[str]:
        return self.regions.holders(model, bundle, self.now())

    def workers(self, region: str, model: str) -> list[str]:
        """All workers of a model there, by their names in this region."""
        return self.regions.workers(region, model, self.now())

    async def _on_summary(self, message: Message) -> None:
        try:
            summary = codec.decode(RegionSummary, message.data)
        except CodecError as error:
            log.debug("a summary on %s is unreadable: %s", message.subject, error)
            return
        if message.subject.split(".")[-2] != summary.region or summary.region == self.subjects.region:
            return
        now = self.now()
        self.regions.hear(summary, now)
        self.regions.forget_silent(now)
        self.on_change()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`hash` changes whenever tokenizer, template or defaults do."""

    name: str
    hash: str
    bundle: Bundle
    tokenizer: ModelTokenizer

    @property
    def fingerprint(self) -> str:
        return f"fp_{self.hash[:12]}"


@dataclass(eq=False, slots=True)
class Models:
    """The cache of bundles by hash. Owned by the event loop; `executor` builds tokenizers."""

    source: Client
    view: FleetView
    executor: Executor
    regions: OtherRegions
    bundles: dict[tuple[str, str], ServedModel] = field(default_factory=dict)
    fetching: dict[tuple[str, str], asyncio.Task[ServedModel]] = field(default_factory=dict)

    def start(self) -> None:
        for view in list(self.view.ready()):
            self._prefetch(view.record)
        self.on_regions()

    def on_regions(self) -> None:
        """Fetch bundles that are not here yet, or whose fetch failed before."""
        for record in self.regions.records().values():
            self._prefetch(record)

    async def stop(self) -> None:
        await end(self.fetching.values())

    def on_member(self, change: Change, view: WorkerView) -> None:
        """A listener of `Members`: a new worker's bundle is here before its first request."""
        if change is not Change.LEFT and view.state is State.READY:  # before that it does not answer
            self._prefetch(view.record)

    def served(self) -> dict[str, WorkerRecord]:
        """By the names that are served now: one record that has each. An adapter is another name than its record's
        model."""
        return dict(sorted(self._known().items()))

    def _known(self) -> dict[str, WorkerRecord]:
        return self.regions.records() | self.view.models()

    def remembered(self) -> list[str]:
        """Names of models that are served now, or were until a while ago."""
        gone = [name for view in self.view.workers.values() for name in view.record.models]
        gone += [name for name, _ in self.bundles]
        return sorted({*self._known(), *gone})

    def known(self, name: str | None) -> str | None:
        return name if name is not None and (self.view.knows(name) or name in self.regions.records()) else None

    def is_ready(self) -> bool:
        records = [view.record for view in self.view.ready()]
        return any((one.model, one.bundle) in self.bundles for one in (*records, *self.regions.records().values()))

    def default_name(self) -> str:
        """The model of a request that names none, never an adapter. Raises NoWorkers, and InvalidRequest where several
        are served."""
        names = sorted({record.model for record in self._known().values()})
        if not names:
            raise NoWorkers("no worker is ready", retry_after_s=2.0)
        if len(names) > 1:
            raise InvalidRequest(f"must be one of {', '.join(names)}: several models are served", field="model_name")
        return names[0]

    async def get(self, name: str, *, field: str = "model") -> ServedModel:
        """Raises ModelNotFound, NoWorkers, or Unavailable when no worker sends its bundle in time."""
        record = self.view.models().get(name) or self.regions.records().get(name)
        if record is None and (kept := self._kept(name)) is not None:
            return kept  # its placement refuses the request, and knows what waits for a worker
        if record is None:
            await self.source.miss(name)  # it may be one of this fleet that has no worker just now
            if self.view.knows(name):
                raise NoWorkers(f"no worker of {name!r} is ready", retry_after_s=2.0)
            raise ModelNotFound(f"no worker serves {name!r}", field=field)
        served = self.bundles.get((record.model, record.bundle))
        if served is None:
            served = await asyncio.shield(self._fetch(record))
        return served if served.name == name else replace(served, name=name)  # an adapter has its model's tokenizer

    def _kept(self, name: str) -> ServedModel | None:
        """The newest of a model that had a worker until a while ago."""
        return next((one for (model, _), one in reversed(self.bundles.items()) if model == name), None)

    def _prefetch(self, record: WorkerRecord) -> None:
        if record.bundle and (record.model, record.bundle) not in self.bundles:
            self._fetch(record)

    def _fetch(self, record: WorkerRecord) -> asyncio.Task[ServedModel]:
        key = (record.model, record.bundle)
        task = self.fetching.get(key)
        if task is None:
            task = self.fetching[key] = asyncio.create_task(self._load(record), name=f"bundle-{record.model}")
            task.add_done_callback(_log_failure)
            task.add_done_callback(lambda _: self.fetching.pop(key, None))
        return task

    async def _load(self, record: WorkerRecord) -> ServedModel:
        """Ask every worker that has this bundle until one answers."""
        holders = [
            view.record.id
            for view in self.view.workers.values()
            if view.state in (State.READY, State.DRAINING)
            and (view.record.model, view.record.bundle) == (record.model, record.bundle)
        ]
        holders.sort(key=lambda one: one != record.id)
        for worker in (*holders, *self.regions.holders(record.model, record.bundle)):
            try:
                bundle = await self.source.bundle(worker)
            except (KvfleetError, TimeoutError) as error:
                log.warning("the bundle of %s could not be had from %s: %s", record.model, worker, error)
                continue
            loop = asyncio.get_running_loop()
            tokenizer = await loop.run_in_executor(self.executor, ModelTokenizer, bundle)
            served = ServedModel(record.model, record.bundle, bundle, tokenizer)
            self._keep(served)
            return served
        raise Unavailable(f"no worker hands over the tokenizer of {record.model!r}", retry_after_s=2.0)

    def _keep(self, served: ServedModel) -> None:
        self.bundles[served.name, served.hash] = served
        records = [view.record for view in self.view.workers.values()]
        named = {(one.model, one.bundle) for one in (*records, *self.regions.records().values())}
        unnamed = [key for key in self.bundles if key not in named]
        for key in unnamed[: max(0, len(unnamed) - KEPT_UNNAMED)]:
            del self.bundles[key]


def _log_failure(task: asyncio.Task[ServedModel]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("bundle not loaded yet: %s", error)
