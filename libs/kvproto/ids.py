"""Identifiers and the subject tokens made of them. Pure, but for the `new_*` functions.

A token is `[A-Za-z0-9_-]` only, so that no name can widen a subject (`*`, `>`), split it (`.`) or break a log line.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")

DEFAULT_TENANT = "public"
DEFAULT_NAMESPACE = "kvf"


def is_token(text: str) -> bool:
    return _TOKEN.match(text) is not None


def base32(raw: bytes) -> str:
    """Lower-case base32 without padding: safe in subjects, file names and host names."""
    return base64.b32encode(raw).decode().rstrip("=").lower()


def new_request_id() -> str:
    """128 random bits: unguessable, so an inbox that ends in it cannot be guessed either."""
    return base32(os.urandom(16))


def new_process_id() -> str:
    """64 random bits, for a process that has no stable name."""
    return base32(os.urandom(8))


def model_token(name: str) -> str:
    """The name where it is a legal token, else `m_` and base32 of its hash. Names in `m_` are hashed: none collides."""
    if is_token(name) and not name.startswith("m_"):
        return name
    return "m_" + base32(hashlib.blake2b(name.encode(), digest_size=16).digest())


def session_key(tenant: str, seq_id: str) -> str:
    """KV key of a session: keys of two tenants differ, whatever bytes a client puts into `seq_id`."""
    return f"{tenant}.{base32(hashlib.blake2b(seq_id.encode(), digest_size=16).digest())}"


def tenant_of(key: str) -> str:
    """The tenant in a session's key."""
    return key.partition(".")[0]


def epoch(started_ms: int, nonce: int) -> str:
    """One life of a process, which scopes its blocks and events. As clocks differ, it does not tell which is later."""
    return f"{started_ms:011x}-{nonce:016x}"


def new_epoch() -> str:
    return epoch(int(time.time() * 1000), int.from_bytes(os.urandom(8), "little"))
