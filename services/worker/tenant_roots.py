"""Where the hash chain of a tenant's sequence starts. Pure.

A tenant's root is salted with HMAC(fleet key, tenant), so prefixes of two tenants never meet; only a prefix that the
operator registered as public is chained under the public root, which all tenants share.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvproto import block_hash
from kvproto.block_hash import ForkedRoot, Root
from kvproto.messages import Bundle

MAX_KEPT = 4096


class TenantRoots:
    """Roots for one model. The public root's salt is empty, which no tenant's HMAC can be."""

    def __init__(self, bundle: Bundle, fleet_key: bytes) -> None:
        self._bundle = bundle
        self._fleet_key = fleet_key
        self._kept: dict[str, bytes] = {}
        self._public = block_hash.root(bundle.model_revision, bundle.block_size, b"")
        self._prefixes = sorted(bundle.public_prefixes, key=len, reverse=True)

    def of(self, tenant: str, ids: Sequence[int]) -> Root:
        """Root of the chain over `ids`: forked where they begin with a public prefix, the longest one if several."""
        own = self._own(tenant)
        for prefix in self._prefixes:
            if tuple(ids[: len(prefix)]) == prefix:
                return ForkedRoot(self._public, own, len(prefix) // self._bundle.block_size)
        return own

    def _own(self, tenant: str) -> bytes:
        root = self._kept.get(tenant)
        if root is None:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            salt = block_hash.tenant_salt(self._fleet_key, tenant)
            root = self._kept[tenant] = block_hash.root(self._bundle.model_revision, self._bundle.block_size, salt)
        return root
