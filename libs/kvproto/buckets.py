"""Adapter: JetStream KV buckets. `kvfleet init` creates them (`ensure_buckets`); services only open them.

Works around faults of nats-py 2.16: `get()` and `create()` stumble over limit markers, which are absent keys here; a
watch may mark the end of what existed too early, or never.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import nats.errors
import nats.js.errors as js_errors
from nats.js.api import KeyValueConfig, StorageType

from kvproto.connection import Connection
from kvproto.errors import KvfleetError, Unavailable
from kvproto.subjects import Subjects
from kvproto.tasks import end

log = logging.getLogger(__name__)

MEMBER_TTL_S = 3.0
MARKER_TTL_S = 60.0
MAX_WATCHES = 100_000  # of a bucket
RESPONSES_TTL_S = 30 * 86_400.0
RESPONSES_BYTES = 256 * 1024**2  # JetStream sets so much aside
BATCHES_TTL_S = 30 * 86_400.0
BATCHES_BYTES = 256 * 1024**2  # what does not fit is refused: nothing that waits gives way


class StaleRevision(KvfleetError, code="stale_revision", http_status=409):
    """A compare-and-set lost: the key was written in between."""


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: bytes | None  # None: absent (deleted, expired, never written)
    revision: int
    expired: bool = False  # absent because its time to live ended, not deleted


_BUSY = (nats.errors.Error, TimeoutError, js_errors.Error)


@contextlib.contextmanager
def _jetstream(what: str, key: str, revision: int | None = None) -> Iterator[None]:
    """Raises Unavailable if JetStream does not answer, StaleRevision if `revision` is not the last one."""
    try:
        yield
    except _BUSY as error:
        if revision is not None and isinstance(error, js_errors.BadRequestError) and "sequence" in str(error):
            raise StaleRevision(f"{key} is no longer at revision {revision}") from None
        raise Unavailable(f"cannot {what} {key}: {type(error).__name__}") from None


@dataclass(eq=False, slots=True)
class Bucket:
    """One bucket. All methods raise Unavailable when JetStream does not answer in time."""

    name: str
    _js: Any
    _kv: Any
    _stopping: set[asyncio.Task[None]] = field(default_factory=set)  # of watches whose openers were cancelled

    @classmethod
    async def open(cls, connection: Connection, name: str) -> Bucket:
        """Raises Unavailable if the bucket does not exist or JetStream is off."""
        try:
            jetstream = connection.raw.jetstream(timeout=2)
            return cls(name, jetstream, await jetstream.key_value(name))
        except js_errors.BucketNotFoundError:
            raise Unavailable(f"the bucket {name} does not exist; `kvfleet init` creates it") from None
        except _BUSY as error:
            raise Unavailable(f"cannot open the bucket {name}: {type(error).__name__} {error}") from None

    async def get(self, key: str) -> Entry:
        with _jetstream("read", key):
            try:
                entry = await self._kv.get(key)
            except js_errors.KeyNotFoundError as error:  # with the delete marker's revision, if there is one
                return Entry(key, None, error.entry.revision if error.entry else 0)
        return Entry(key, entry.value or None, entry.revision, not entry.value and entry.operation == "PURGE")

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Compare-and-set: write if the key's last revision (value or marker; 0: never written) is `revision`."""
        with _jetstream("write", key, revision):
            return int(await self._kv.update(key, value, last=revision))

    async def delete(self, key: str, revision: int | None = None) -> None:
        """With a revision only if it is still the last one (else StaleRevision). The marker expires by itself."""
        headers = {"KV-Operation": "DEL"}
        if revision:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(revision)
        with _jetstream("delete", key, revision or 0):
            await self._js.publish(f"$KV.{self.name}.{key}", b"", headers=headers, msg_ttl=MARKER_TTL_S)

    async def listed(self, pattern: str = ">") -> list[Entry]:
        """The present keys."""
        watch = await self.watch(pattern)
        found = []
        try:
            async for entry in watch.entries():
                if entry is None:
                    break
                if entry.value is not None:
                    found.append(entry)
        finally:
            await watch.stop()
        return found

    async def watch(self, pattern: str = ">") -> BucketWatch:
        """Every key's last value, then every change. Rebuild it after a reconnect (`Connection.on_reconnect`)."""
        opening = asyncio.create_task(self._open_watch(pattern), name=f"open-watch-{self.name}")
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:  # the library would leave its subscription: it opens, and is stopped
            stopping = asyncio.create_task(_stop_when_open(opening), name=f"stop-watch-{self.name}")
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)
            raise

    async def _open_watch(self, pattern: str) -> BucketWatch:
        watcher = None
        try:
            watcher = await self._kv.watch(pattern)
            sent = await watcher._sub.consumer_info()
        except (*_BUSY, asyncio.InvalidStateError) as error:  # the latter of a watch whose server took too long
            if watcher is not None:
                await BucketWatch(watcher, False).stop()
            raise Unavailable(f"cannot watch {self.name}: {type(error).__name__} {error}") from None
        return BucketWatch(watcher, not (sent.num_pending or sent.delivered.consumer_seq))


@dataclass(eq=False, slots=True)
class BucketWatch:
    """An iterator of entries; `None` marks the end of what existed when the watch began."""

    _watcher: Any
    _is_empty: bool  # nothing existed

    async def entries(self) -> AsyncIterator[Entry | None]:
        is_listed = self._is_empty
        if is_listed:
            yield None
        async for entry in self._watcher:
            if entry is None:
                continue  # the library's own mark
            absent = entry.operation in ("DEL", "PURGE") or not entry.value
            expired = entry.operation == "PURGE"
            yield Entry(entry.key, None if absent else entry.value, entry.revision, expired)
            if not is_listed and not entry.delta:  # entries that are still to come
                is_listed = True
                yield None

    async def stop(self) -> None:
        jsi = self._watcher._sub._sub._jsi
        for task in (
            jsi._hbtask,
            jsi._fctask,
        ):  # else one that cannot unsubscribe now subscribes again when it is silent
            if task is not None:
                task.cancel()
        try:
            await self._watcher.stop()
        except (*_BUSY, asyncio.InvalidStateError, OSError):
            pass  # the subscription is gone with its connection


async def _stop_when_open(opening: asyncio.Task[BucketWatch]) -> None:
    with contextlib.suppress(Unavailable):
        await (await opening).stop()


@dataclass(eq=False)
class BucketFollower:
    """Calls `read` with a watch of a bucket, and with a new one after each end and each reconnect, until `stop`. `read`
    sets `listed` when it has read all that existed."""

    connection: Connection
    bucket: str
    pattern: str
    what: str  # for logs
    read: Callable[[BucketWatch], Awaitable[None]]
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    _watch: BucketWatch | None = None
    _following: asyncio.Task[None] | None = None
    _former: set[asyncio.Task[None]] = field(default_factory=set)  # that have not ended yet

    async def start(self, timeout_s: float) -> None:
        """Returns when all present entries were read. Raises Unavailable, and has stopped then."""
        self.connection.on_reconnect.append(self.begin)
        await self.begin()
        try:
            await asyncio.wait_for(self.listed.wait(), timeout_s)
        except TimeoutError:
            await self.stop()
            raise Unavailable(f"the bucket {self.bucket} could not be read in {timeout_s} s") from None

    async def begin(self) -> None:
        if self._following is not None:
            self._former.add(self._following)
            self._following.add_done_callback(self._former.discard)
        self._following = asyncio.create_task(self._follow(), name=f"{self.what}-watch")

    async def stop(self) -> None:
        with contextlib.suppress(ValueError):
            self.connection.on_reconnect.remove(self.begin)
        if self._following is not None:
            await end([self._following, *self._former])
        if self._watch is not None:
            await self._watch.stop()

    async def _follow(self) -> None:
        await end(self._former)  # which one cancellation does not always do
        while True:
            try:
                bucket = await Bucket.open(self.connection, self.bucket)
                watch = self._watch = await bucket.watch(self.pattern)
                try:
                    await self.read(watch)
                finally:
                    await watch.stop()
            except Unavailable as error:
                log.warning("%s: %s", self.what, error)
            except Exception:  # a loop's top: without its watch a process would only look alive
                log.exception("%s: the watch failed and begins again", self.what)
            await asyncio.sleep(0.5)


async def ensure_buckets(
    connection: Connection,
    subjects: Subjects,
    *,
    replicas: int = 1,
    patience_s: float = 0.0,
    responses_ttl_s: float = RESPONSES_TTL_S,
    responses_bytes: int = RESPONSES_BYTES,
    batches_bytes: int = BATCHES_BYTES,
) -> list[str]:
    """Create missing buckets; return one line for each difference in a bucket's configuration. Raises Unavailable when
    JetStream cannot do it within `patience_s`: a cluster that has just started has no leader yet.

    Limit markers tell watchers when a member vanishes. FILE storage: watchers of a memory bucket stay blind after a
    server's restart until sequences catch up.
    """
    jetstream = connection.raw.jetstream(timeout=5)
    shared = {"history": 1, "storage": StorageType.FILE, "replicas": replicas, "direct": True}
    wanted = [
        KeyValueConfig(bucket=subjects.members_bucket, ttl=MEMBER_TTL_S, limit_marker_ttl=MEMBER_TTL_S, **shared),
        KeyValueConfig(bucket=subjects.sessions_bucket, **shared),
        KeyValueConfig(bucket=subjects.keys_bucket, **shared),
        KeyValueConfig(bucket=subjects.responses_bucket, ttl=responses_ttl_s, max_bytes=responses_bytes, **shared),
        KeyValueConfig(bucket=subjects.batches_bucket, ttl=BATCHES_TTL_S, max_bytes=batches_bytes, **shared),
    ]
    differences = []
    for config in wanted:
        existing = await _find_or_create(jetstream, config, patience_s)
        discard = "old" if config.bucket == subjects.responses_bucket else None  # the oldest give way
        differences += await _set(connection, config.bucket, discard)
        if existing is None:
            continue
        status = await existing.status()
        found = status.stream_info.config
        for what, have, want in (
            ("replicas", found.num_replicas, config.replicas),
            ("ttl", found.max_age or 0, config.ttl or 0),
            ("max_bytes", max(found.max_bytes or 0, 0), config.max_bytes or 0),
            ("storage", str(found.storage).split(".")[-1].lower(), "file"),
        ):
            if have != want:
                differences.append(f"bucket {config.bucket}: {what} is {have}, the configuration says {want}")
    return differences


async def _set(connection: Connection, bucket: str, discard: str | None) -> list[str]:
    """What the library cannot. Each worker's watch is a consumer, and nats-server from 2.15 on refuses more than 1,000
    of a stream without a `max_consumers`. Returns a line if it cannot be set."""
    stream = f"KV_{bucket}"
    try:
        told = await connection.request(f"$JS.API.STREAM.INFO.{stream}", b"", 5.0)
        config = json.loads(told.data)["config"]
        wanted = config | {"max_consumers": max(config["max_consumers"], MAX_WATCHES)}
        if discard is not None:
            wanted["discard"] = discard
        if wanted == config:
            return []
        told = await connection.request(f"$JS.API.STREAM.UPDATE.{stream}", json.dumps(wanted).encode(), 5.0)
        why = json.loads(told.data).get("error", {}).get("description", "")
    except (KvfleetError, TimeoutError, ValueError, KeyError) as error:
        why = f"{type(error).__name__} {error}"
    refused = "watches beyond 1,000" + (", and entries once it is full" if discard else "")
    return [f"bucket {bucket}: it may refuse {refused} ({why})"] if why else []


async def _find_or_create(jetstream: Any, config: KeyValueConfig, patience_s: float) -> Any:
    """The existing bucket; None where it has just been created."""
    until = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            try:
                return await jetstream.key_value(config.bucket)
            except js_errors.BucketNotFoundError:
                await jetstream.create_key_value(config)
                return None
        except _BUSY as error:
            if asyncio.get_running_loop().time() > until:
                why = f"{type(error).__name__} {error}"
                raise Unavailable(f"the bucket {config.bucket} cannot be made: {why}") from None
            await asyncio.sleep(0.25)
