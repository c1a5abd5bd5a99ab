"""Adapter: the keys that open the data plane, kept in the bucket `kvf_keys` as `dataplane.<id>`, 32 random bytes each.

Only workers and vaults may read that bucket. The newest key, by revision, is the one to begin connections with; older
ones are accepted until they are deleted, so that a rotation needs no pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Mapping
from typing import NamedTuple

from kvproto.buckets import Bucket, BucketWatch, Entry, StaleRevision
from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvproto.ids import new_process_id
from kvproto.subjects import Subjects
from kvproto.tasks import end

log = logging.getLogger(__name__)

KEY_BYTES = 32
FIRST_ID = "first"
LIST_S = 10.0
_PREFIX = "dataplane."
_PATTERN = f"{_PREFIX}*"


class Key(NamedTuple):
    id: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Key({self.id!r})"  # a log must not tell the secret


class KeyRing:
    """The keys as they are now. Thread-safe; `update` has one caller. `accepted` are keys beside them that others may
    begin connections with, and that `update` leaves alone."""

    def __init__(self, mapping: Mapping[str, bytes] | None = None, accepted: Mapping[str, bytes] | None = None) -> None:
        self._lock = threading.Lock()
        self._accepted = dict(accepted or {})
        self._keys: dict[str, bytes] = dict(mapping or {})

    def update(self, mapping: Mapping[str, bytes]) -> None:
        """Replace all: id to secret, oldest first; the last one is the current."""
        with self._lock:
            self._keys = dict(mapping)

    def current(self) -> Key:
        """Raises Unavailable while there is none."""
        keys = self.newest_first()
        if not keys:
            raise Unavailable("there is no key for the data plane; `kvfleet init` creates one")
        return keys[0]

    def get(self, key_id: str) -> bytes | None:
        with self._lock:
            return self._keys.get(key_id) or self._accepted.get(key_id)

    def newest_first(self) -> list[Key]:
        with self._lock:
            return [Key(key_id, secret) for key_id, secret in reversed(self._keys.items())]


async def ensure_key(bucket: Bucket) -> None:
    """Create the first key if there is none; of many callers at once one creates it. Raises Unavailable."""
    if await _listed(bucket):
        return
    with contextlib.suppress(StaleRevision):  # somebody else just did
        found = await bucket.get(f"{_PREFIX}{FIRST_ID}")
        if found.value is None:
            await bucket.update(found.key, secrets.token_bytes(KEY_BYTES), found.revision)


async def rotate_key(bucket: Bucket) -> str:
    """A new current key; returns its id. The one before stays accepted, older ones are deleted: a key that has become
    known is out after two rotations. Raises Unavailable."""
    before = await _listed(bucket)
    key_id = new_process_id()
    await bucket.update(f"{_PREFIX}{key_id}", secrets.token_bytes(KEY_BYTES), 0)
    for entry in before[:-1]:
        with contextlib.suppress(StaleRevision):
            await bucket.delete(entry.key, entry.revision)
    return key_id


async def _listed(bucket: Bucket) -> list[Entry]:
    """Oldest first. Raises Unavailable."""
    watch = await bucket.watch(_PATTERN)
    found = []
    try:
        async with asyncio.timeout(LIST_S):
            async for entry in watch.entries():
                if entry is None:
                    break
                if entry.value is not None:
                    found.append(entry)
    except TimeoutError:
        raise Unavailable(f"the bucket {bucket.name} could not be read in {LIST_S} s") from None
    finally:
        await watch.stop()
    return sorted(found, key=lambda entry: entry.revision)


class KeyWatch:
    """Keeps a ring as the bucket is, on the loop that made it, over reconnects. `follow_keys` starts one."""

    def __init__(self, connection: Connection, subjects: Subjects, ring: KeyRing) -> None:
        self._connection = connection
        self._bucket = subjects.keys_bucket
        self._ring = ring
        self._listed = asyncio.Event()
        self._watch: BucketWatch | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float = 10.0) -> None:
        """Returns when the keys of now are in the ring. Raises Unavailable."""
        self._connection.on_reconnect.append(self._rewatch)
        await self._rewatch()
        try:
            await asyncio.wait_for(self._listed.wait(), timeout_s)
        except TimeoutError:
            await self.stop()
            raise Unavailable(f"the bucket {self._bucket} could not be read in {timeout_s} s") from None

    async def stop(self) -> None:
        with contextlib.suppress(ValueError):
            self._connection.on_reconnect.remove(self._rewatch)
        if self._following is not None:
            await end([self._following])
        if self._watch is not None:
            await self._watch.stop()

    async def _rewatch(self) -> None:
        """After a reconnect the old watch is blind: list everything again."""
        if self._following is not None:
            self._following.cancel()
        self._following = asyncio.create_task(self._follow(), name="keys-watch")

    async def _follow(self) -> None:
        while True:
            try:
                bucket = await Bucket.open(self._connection, self._bucket)
                watch = self._watch = await bucket.watch(_PATTERN)
                try:
                    await self._read(watch)
                finally:
                    await watch.stop()
            except Unavailable as error:
                log.warning("data-plane keys: %s", error)
            except Exception:  # a loop's top: without its keys a process would be shut out one day
                log.exception("data-plane keys: the watch failed and begins again")
            await asyncio.sleep(0.5)

    async def _read(self, watch: BucketWatch) -> None:
        """The ring keeps what it had until the list is complete: an outage shuts nobody out."""
        held: dict[str, tuple[int, bytes]] = {}
        listed = False
        async for entry in watch.entries():
            if entry is None:
                listed = True
            else:
                key_id = entry.key.removeprefix(_PREFIX)
                held.pop(key_id, None)
                if entry.value is not None and len(entry.value) == KEY_BYTES:
                    held[key_id] = (entry.revision, entry.value)
                elif entry.value is not None:
                    log.warning("data-plane key %s has %d bytes, not %d", key_id, len(entry.value), KEY_BYTES)
            if listed:
                oldest_first = sorted(held.items(), key=lambda item: item[1][0])
                self._ring.update({key_id: secret for key_id, (_, secret) in oldest_first})
                self._listed.set()


async def follow_keys(
    connection: Connection, subjects: Subjects, ring: KeyRing, *, timeout_s: float = 10.0
) -> KeyWatch:
    """Fill the ring now and keep it up to date until `stop`. Raises Unavailable."""
    watch = KeyWatch(connection, subjects, ring)
    await watch.start(timeout_s)
    return watch
