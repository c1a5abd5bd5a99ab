"""Where the hash chain of a tenant's sequence starts. Pure.

A tenant's root is salted with HMAC(fleet key, tenant), so prefixes of two tenants never meet; only a prefix that the
operator registered as public is chained under the public root, which all tenants share. A process that computes hashes
knows public prefixes by length and digest: a worker's record says them, its bundle has their token ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from kvproto import block_hash
from kvproto.block_hash import ForkedRoot, Root
from kvproto.messages import PublicPrefix

MAX_KEPT = 4096
DIGEST_BYTES = 16


def public_prefix(ids: Sequence[int]) -> PublicPrefix:
    """What a record says of a public prefix: how long it is, and blake2b-16 over its packed token ids."""
    return PublicPrefix(len(ids), hashlib.blake2b(block_hash.pack_ids(ids), digest_size=DIGEST_BYTES).digest())


class TenantRoots:
    """Roots for one model. The public root's salt is empty, which no tenant's HMAC can be."""

    def __init__(
        self, model_revision: str, block_size: int, public_prefixes: Iterable[PublicPrefix], fleet_key: bytes
    ) -> None:
        self._model_revision = model_revision
        self._block_size = block_size
        self._fleet_key = fleet_key
        self._kept: dict[str, bytes] = {}
        self._public = block_hash.root(model_revision, block_size, b"")
        self._digests: dict[int, set[bytes]] = {}  # by length, shortest first
        for prefix in sorted(public_prefixes, key=lambda one: one.tokens):
            self._digests.setdefault(prefix.tokens, set()).add(prefix.digest)

    def of(self, tenant: str, ids: Sequence[int]) -> Root:
        """Root of the chain over `ids`: forked where they begin with a public prefix, the longest one if several."""
        own = self._own(tenant)
        matched = self._matched(ids)
        return own if matched is None else ForkedRoot(self._public, own, matched // self._block_size)

    def _matched(self, ids: Sequence[int]) -> int | None:
        """Tokens of the longest public prefix that `ids` begin with. Each token is hashed once, however many there
        are of them."""
        matched = None
        running = hashlib.blake2b(digest_size=DIGEST_BYTES)
        hashed = 0
        for tokens, digests in self._digests.items():
            if tokens > len(ids):
                break
            running.update(block_hash.pack_ids(ids[hashed:tokens]))
            hashed = tokens
            if running.digest() in digests:
                matched = tokens
        return matched

    def _own(self, tenant: str) -> bytes:
        root = self._kept.get(tenant)
        if root is None:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            salt = block_hash.tenant_salt(self._fleet_key, tenant)
            root = self._kept[tenant] = block_hash.root(self._model_revision, self._block_size, salt)
        return root
