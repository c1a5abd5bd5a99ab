"""Content addresses of KV blocks. Pure.

A block's hash is `blake2b(parent16 || block_size x u32le, digest_size=16)`: it names the block's tokens and, through
its parent, everything before them. At 128 bits no token comparison is needed on a hit. The root binds all else that
decides K and V, and the tenant's salt, so prefixes of two tenants never meet; only prefixes that the operator
registered as public are chained under the public root, which all tenants share.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgpack

from kvproto.messages import PublicPrefix

HASH_BYTES = 16
TURN = 21  # bits, for each tier further down
MAX_KEPT = 4096  # roots of tenants
STATE_ID = 2**32 - 1  # no token: what it follows is a recurrent state, that of all tokens before it
LAYOUT_VERSION = 1  # of the block's bytes: [layers, 2, kv_heads, block_size, head_dim]


def tenant_salt(fleet_key: bytes, tenant: str) -> bytes:
    """HMAC-SHA256(fleet key, tenant), never derived from a request's body."""
    return hmac.digest(fleet_key, tenant.encode(), "sha256")


def root(model_revision: str, block_size: int, salt: bytes, *, lora: str = "", layout: int = LAYOUT_VERSION) -> bytes:
    """Start of every chain: the hash of a fixed tuple in canonical msgpack, 16 bytes."""
    packed: bytes = msgpack.packb([model_revision, layout, block_size, lora, salt], use_bin_type=True)
    return hashlib.blake2b(packed, digest_size=HASH_BYTES).digest()


@dataclass(frozen=True, slots=True)
class ForkedRoot:
    """Root of a sequence that begins with a public prefix of `blocks` full blocks. Those are chained under the public
    root; the first block past them mixes the tenant's own root in."""

    public: bytes
    own: bytes
    blocks: int


Root = bytes | ForkedRoot


def parent_of(root: Root, hashes: Sequence[bytes], index: int) -> bytes:
    """The parent that the `index`-th block is hashed with: the block before it, the root, or both at a fork."""
    if isinstance(root, bytes):
        return hashes[index - 1] if index else root
    if index == root.blocks:
        before = hashes[index - 1] if index else root.public
        return hashlib.blake2b(before + root.own, digest_size=HASH_BYTES).digest()
    return hashes[index - 1] if index else root.public


def before(root: Root, hashes: Sequence[bytes], index: int) -> bytes:
    """The block before the `index`-th, or the first root: `parent_of` without the mixing at a fork."""
    if index:
        return hashes[index - 1]
    return root if isinstance(root, bytes) else root.public


def own_root(root: Root) -> bytes:
    return root.own if isinstance(root, ForkedRoot) else root


def root_at(root: Root, index: int) -> bytes:
    """The root under which the `index`-th block is kept."""
    if isinstance(root, ForkedRoot):
        return root.public if index < root.blocks else root.own
    return root


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(raw: bytes) -> tuple[int, ...]:
    """Inverse of `pack_ids`. Raises ValueError if the length is not a multiple of four."""
    ids = array("I")
    ids.frombytes(raw)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def child(parent: bytes, ids: Sequence[int]) -> bytes:
    """Hash of one full block, given the hash of the block before it (or the root)."""
    return hashlib.blake2b(parent + pack_ids(ids), digest_size=HASH_BYTES).digest()


def state_after(block_hash: bytes) -> bytes:
    """Under which a hybrid model's recurrent state at the end of this block is kept: as a block behind it would be."""
    return child(block_hash, (STATE_ID,))


def chain(root: Root, ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `ids`, in order; a partial last block has none."""
    packed = pack_ids(ids)
    step = 4 * block_size
    fork = -1 if isinstance(root, bytes) else root.blocks
    hashes: list[bytes] = []
    parent = parent_of(root, hashes, 0)
    for index in range(len(ids) // block_size):
        if index == fork:
            parent = parent_of(root, hashes, index)
        block = packed[index * step : (index + 1) * step]
        parent = hashlib.blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def digest_term(block_hash: bytes) -> int:
    """A block's contribution, by XOR, to the digest of one tier: the first 8 bytes, u64le."""
    return int.from_bytes(block_hash[:8], "little")


def in_tier(digest: int, tier: int) -> int:
    """A tier's digest as its contribution, by XOR, to that of all tiers: rotated, so that a block in two tiers does not
    cancel out. `tier` is its number, the device's being 0."""
    turned = TURN * tier % 64
    return (digest << turned | digest >> 64 - turned) & 0xFFFF_FFFF_FFFF_FFFF


def public_prefix(ids: Sequence[int]) -> PublicPrefix:
    return PublicPrefix(len(ids), hashlib.blake2b(pack_ids(ids), digest_size=HASH_BYTES).digest())


class TenantRoots:
    """Roots for one model, or for an adapter of it, `lora`. The public root's salt is empty, which no tenant's HMAC can
    be."""

    def __init__(
        self,
        model_revision: str,
        block_size: int,
        public_prefixes: Iterable[PublicPrefix],
        fleet_key: bytes,
        lora: str = "",
    ) -> None:
        self._model_revision = model_revision
        self._block_size = block_size
        self._fleet_key = fleet_key
        self._lora = lora
        self._own = lru_cache(maxsize=MAX_KEPT)(self._root_of)
        self._public = root(model_revision, block_size, b"", lora=lora)
        self._digests: dict[int, set[bytes]] = {}  # by length, shortest first
        for prefix in sorted(public_prefixes, key=lambda one: one.tokens):
            self._digests.setdefault(prefix.tokens, set()).add(prefix.digest)

    def of(self, tenant: str, ids: Sequence[int]) -> Root:
        """Root of the chain over `ids`, forked after the longest public prefix that they begin with."""
        own = self._own(tenant)
        matched = self._matched(ids)
        return own if matched is None else ForkedRoot(self._public, own, matched // self._block_size)

    def _matched(self, ids: Sequence[int]) -> int | None:
        """Tokens of the longest public prefix that `ids` begin with. Hashes each token once."""
        matched = None
        running = hashlib.blake2b(digest_size=HASH_BYTES)
        hashed = 0
        for tokens, digests in self._digests.items():
            if tokens > len(ids):
                break
            running.update(pack_ids(ids[hashed:tokens]))
            hashed = tokens
            if running.digest() in digests:
                matched = tokens
        return matched

    def _root_of(self, tenant: str) -> bytes:
        salt = tenant_salt(self._fleet_key, tenant)
        return root(self._model_revision, self._block_size, salt, lora=self._lora)
