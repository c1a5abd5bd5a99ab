"""Identifiers and the subject tokens made of them. Pure: randomness and time are passed in by `new_*` callers only.

A subject token is what NATS allows between dots, narrowed to `[A-Za-z0-9_-]` so that no name can widen a subject
(`*`, `>`), split it (`.`) or break a log line.
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
    """Whether `text` may stand as one token of a subject or a KV key."""
    return _TOKEN.match(text) is not None


def base32(raw: bytes) -> str:
    """Lower-case base32 without padding: safe in subjects, file names and host names."""
    return base64.b32encode(raw).decode().rstrip("=").lower()


def new_request_id() -> str:
    """128 random bits: unguessable, so an inbox that ends in it cannot be guessed either."""
    return base32(os.urandom(16))


def new_process_id() -> str:
    """A short random id for a process that has no stable name (ingress, placement, client)."""
    return base32(os.urandom(8))


def model_token(name: str) -> str:
    """A model's subject token: the served name where it is a legal token, else base32 of its hash.

    Hashed names start with `m_`, so a served name that imitates one is hashed too and cannot collide.
    """
    if is_token(name) and not name.startswith("m_"):
        return name
    return "m_" + base32(hashlib.blake2b(name.encode(), digest_size=16).digest())


def session_key(tenant: str, seq_id: str) -> str:
    """KV key of a session: tenants cannot meet, whatever bytes a client puts into `seq_id`."""
    return f"{tenant}.{base32(hashlib.blake2b(seq_id.encode(), digest_size=16).digest())}"


def tenant_of(key: str) -> str:
    """Whose session's key this is."""
    return key.partition(".")[0]


def epoch(started_ms: int, nonce: int) -> str:
    """One life of a process, by unix time and 64 random bits: scopes blocks, events and data plane. Clocks differ
    between hosts, so which life is the later one is told by the revisions at which they registered (`members.Lease`),
    never by this."""
    return f"{started_ms:011x}-{nonce:016x}"


def new_epoch() -> str:
    return epoch(int(time.time() * 1000), int.from_bytes(os.urandom(8), "little"))
