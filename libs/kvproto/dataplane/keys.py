"""Adapter: the data plane's keys in the bucket `kvf_keys` as `dataplane.<id>`, 32 random bytes each.

Only workers and vaults may read that bucket. Connections begin with the newest key, by revision; older ones are
accepted until they are deleted, so that a rotation needs no pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Mapping
from typing import NamedTuple

from kvproto.buckets import Bucket, BucketFollower, BucketWatch, Entry, StaleRevision
from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvproto.ids import new_process_id
from kvproto.subjects import Subjects

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
    """The present keys. Thread-safe; `update` has one caller. `accepted` keys open connections of other ends only, and
    `update` leaves them alone."""

    def __init__(self, mapping: Mapping[str, bytes] | None = None, accepted: Mapping[str, bytes] | None = None) -> None:
        self._lock = threading.Lock()
        self._accepted = dict(accepted or {})
        self._keys: dict[str, bytes] = dict(mapping or {})

    def update(self, mapping: Mapping[str, bytes]) -> None:
        """Replace all: id to secret, oldest first; the last one is current."""
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
    """Create the first key if there is none. Raises Unavailable."""
    if await _listed(bucket):
        return
    with contextlib.suppress(StaleRevision):  # another process just did
        found = await bucket.get(f"{_PREFIX}{FIRST_ID}")
        if found.value is None:
            await bucket.update(found.key, secrets.token_bytes(KEY_BYTES), found.revision)


async def rotate_key(bucket: Bucket) -> str:
    """The id of a new current key. The key before it stays accepted, older ones are deleted: two rotations replace a
    leaked key. Raises Unavailable."""
    before = await _listed(bucket)
    key_id = new_process_id()
    await bucket.update(f"{_PREFIX}{key_id}", secrets.token_bytes(KEY_BYTES), 0)
    for entry in before[:-1]:
        with contextlib.suppress(StaleRevision):
            await bucket.delete(entry.key, entry.revision)
    return key_id


async def _listed(bucket: Bucket) -> list[Entry]:
    """Oldest first. Raises Unavailable."""
    try:
        async with asyncio.timeout(LIST_S):
            return sorted(await bucket.listed(_PATTERN), key=lambda entry: entry.revision)
    except TimeoutError:
        raise Unavailable(f"the bucket {bucket.name} could not be read in {LIST_S} s") from None


async def follow_keys(
    connection: Connection, subjects: Subjects, ring: KeyRing, *, timeout_s: float = 10.0
) -> BucketFollower:
    """Fill the ring and keep it up to date until `stop`. Raises Unavailable."""

    async def read(watch: BucketWatch) -> None:
        """The ring keeps its keys until a new list is complete."""
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
                ring.update({key_id: secret for key_id, (_, secret) in oldest_first})
                follower.listed.set()

    follower = BucketFollower(connection, subjects.keys_bucket, _PATTERN, "data-plane keys", read)
    await follower.start(timeout_s)
    return follower
