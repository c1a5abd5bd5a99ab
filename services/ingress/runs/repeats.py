"""Names requests: after one that was begun before, if the headers say so, else a new one. Pure but for the drawn id.

    Last-Event-ID: <request id>:<position>   a client whose connection broke goes on where it was
    Idempotency-Key: <anything>              a client that may have to send its request again

The request id follows from either alone, so that a repeat has the same one at every ingress. An id allows cancelling,
so a key's id depends on a secret (`key_secret`). A repeat must have the route and body of the first (`digest_of`).

With a fleet secret and several tenants ids are sealed: their last bytes follow from the first and the tenant. A foreign
id is refused alike, whether there is such a request or not.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any

import orjson

from kvfleet.ingress.runs.event_ids import LAST_EVENT_ID, START, Position, read_event_id
from kvproto.errors import InvalidRequest
from kvproto.ids import base32, new_request_id

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_CHARS = 255
OPEN_BYTES = 10  # of an id's 16; the others seal it


@dataclass(frozen=True, slots=True)
class RequestName:
    """`named`: by the caller, so it may have been here before; `keyed`: by an Idempotency-Key."""

    request: str
    at: Position = START
    named: bool = False
    keyed: bool = False

    @property
    def header(self) -> str:
        return IDEMPOTENCY_KEY if self.keyed else LAST_EVENT_ID


def key_secret(fleet_key: bytes, *, one_tenant: bool) -> tuple[bytes, bool]:
    """The secret for request ids of keys, and whether all ingresses have the same. Without a fleet key a secret of this
    process keeps tenants apart."""
    if fleet_key:
        return hashlib.blake2b(fleet_key, person=b"kvf-idempotency").digest(), True
    return (b"", True) if one_tenant else (secrets.token_bytes(32), False)


def name_request(
    tenant: str, last_event_id: str | None, idempotency_key: str | None, secret: bytes = b"", *, sealed: bool = False
) -> RequestName:
    """Raises InvalidRequest naming the header that is wrong."""
    keyed = request_of_key(tenant, idempotency_key, secret) if idempotency_key is not None else None
    if keyed is not None and sealed:
        keyed = seal(tenant, _bytes_of(keyed), secret)
    if last_event_id:  # empty is what a client that has had no event says
        request, at = read_event_id(last_event_id)
        if keyed is not None and keyed != request:
            raise InvalidRequest(f"is of another request than this {IDEMPOTENCY_KEY}", field=LAST_EVENT_ID)
        if sealed and not hmac.compare_digest(seal(tenant, _bytes_of(request), secret), request):
            raise InvalidRequest("is of no request of this tenant", field=LAST_EVENT_ID)
        return RequestName(request, at, named=True, keyed=keyed is not None)
    if keyed is not None:
        return RequestName(keyed, named=True, keyed=True)
    return RequestName(seal(tenant, secrets.token_bytes(OPEN_BYTES), secret) if sealed else new_request_id())


def seal(tenant: str, raw: bytes, secret: bytes) -> str:
    """The tenant's request id that begins with `raw`."""
    begin = raw[:OPEN_BYTES]
    keyed = hashlib.blake2b(tenant.encode() + b"\0" + begin, digest_size=6, key=secret, person=b"kvf-request-id")
    return base32(begin + keyed.digest())


def _bytes_of(request: str) -> bytes:
    return base64.b32decode(request.upper() + "======")


def request_of_key(tenant: str, key: str, secret: bytes = b"") -> str:
    """The request id of a tenant's key. Raises InvalidRequest for a malformed key."""
    if len(key) >= 2 and key[0] == key[-1] == '"':  # a structured field's string
        key = key[1:-1]
    if not (1 <= len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()):
        raise InvalidRequest(f"must be 1 to {MAX_KEY_CHARS} printable ASCII characters", field=IDEMPOTENCY_KEY)
    said = f"{tenant}\0{key}".encode()
    return base32(hashlib.blake2b(said, digest_size=16, key=secret, person=b"kvf-idempotency").digest())


def digest_of(route: str, body: dict[str, Any]) -> bytes:
    """Equal for bodies with the same fields, in any order."""
    said = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(route.encode() + b"\0" + said, digest_size=16).digest()
