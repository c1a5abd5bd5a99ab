"""Inboxes of the fleet's own ingresses and placements: nobody else can make up their names, nor learn them. Pure.

    _ing.<id>-<seal>.>      seal = HMAC(fleet key, role and id), cut

Core NATS tells nobody who published a message, and a publisher may name any reply subject. But producers hear
nothing of what ingresses, placements and workers say to one another. So who names a sealed inbox is one of these, and
what a producer can have sent is never read as an answer to somebody else. Without a fleet key names prove nothing.
"""

from __future__ import annotations

import base64
import hmac
from functools import lru_cache

from kvproto.subjects import INGRESS_INBOX, PLACEMENT_INBOX, inbox_prefix

SEAL_BYTES = 15  # 24 characters
SEALED_ROLES = (INGRESS_INBOX, PLACEMENT_INBOX)
KEPT = 4096  # names that are known to be right or wrong


def sealed_prefix(role_inbox: str, process: str, fleet_key: bytes) -> str:
    """A process's inbox space; without a key its name is as plain as any."""
    if not fleet_key or role_inbox not in SEALED_ROLES:
        return inbox_prefix(role_inbox, process)
    return inbox_prefix(role_inbox, f"{process}-{_seal(role_inbox, process, fleet_key)}")


def is_of_the_fleet(inbox: str, fleet_key: bytes) -> bool:
    """Whether an ingress or a placement asks, and not a producer that says so."""
    role, _, rest = inbox.partition(".")
    return role in SEALED_ROLES and (not fleet_key or _is_sealed(role, rest.partition(".")[0], fleet_key))


@lru_cache(maxsize=KEPT)
def _is_sealed(role_inbox: str, name: str, fleet_key: bytes) -> bool:
    process, _, given = name.rpartition("-")
    return hmac.compare_digest(given.encode(), _seal(role_inbox, process, fleet_key).encode())


def _seal(role_inbox: str, process: str, fleet_key: bytes) -> str:
    text = f"kvfleet inbox\n{role_inbox}\n{process}".encode()
    return base64.b32encode(hmac.digest(fleet_key, text, "sha256")[:SEAL_BYTES]).decode().lower()
