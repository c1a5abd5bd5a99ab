"""The bytes of a data plane connection's handshake. Pure.

    client                                   server
      │ Hello   fixed size, fresh nonce        │     before authentication nothing of variable length is read
      │────────────────────────────────────▶  │
      │      Reply   fresh nonce, its proof    │
      │ ◀────────────────────────────────────  │
      │ proof                                  │
      │────────────────────────────────────▶  │
      │                              verdict   │
      │ ◀────────────────────────────────────  │
      │ frames, one request at a time          │

A proof is HMAC-SHA256 with the shared key over the side, the Hello and the Reply: a recorded proof fits no other nonces
and no other side. Against changes on the wire there is TLS.
"""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum
from typing import NamedTuple

from kvproto.dataplane.errors import HandshakeRefused
from kvproto.errors import InvalidRequest

VERSION = 1
READS_TRACES = 2
NEWEST = READS_TRACES  # what this end reads
MAGIC = b"KVDP"
KEY_ID_BYTES = 32
IDENTITY_BYTES = 64
NONCE_BYTES = 32
PROOF_BYTES = 32


class HandshakeVerdict(IntEnum):
    """The lower-case name is the `reason` of HandshakeRefused."""

    WELCOME = 0
    MALFORMED = 1
    VERSION = 2
    UNKNOWN_KEY = 3
    IDENTITY = 4  # the client expected another server
    BAD_PROOF = 5
    BUSY = 6

    @property
    def reason(self) -> str:
        return self.name.lower()


_HELLO = struct.Struct(f"!4sB{KEY_ID_BYTES}s{IDENTITY_BYTES}s{IDENTITY_BYTES}s{NONCE_BYTES}s")
_REPLY = struct.Struct(f"!4sBB{IDENTITY_BYTES}s{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
REPLY_BYTES = _REPLY.size + PROOF_BYTES


class Hello(NamedTuple):
    version: int
    key_id: str
    identity: str
    expect: str  # the expected identity of the server
    nonce: bytes

    def packed(self) -> bytes:
        key_id = padded("key id", self.key_id, KEY_ID_BYTES)
        identity = padded("identity", self.identity, IDENTITY_BYTES)
        expect = padded("identity", self.expect, IDENTITY_BYTES)
        return _HELLO.pack(MAGIC, self.version, key_id, identity, expect, self.nonce)


class Reply(NamedTuple):
    version: int
    verdict: int
    identity: str
    nonce: bytes

    def packed(self) -> bytes:
        """Without the proof."""
        identity = padded("identity", self.identity, IDENTITY_BYTES)
        return _REPLY.pack(MAGIC, self.version, self.verdict, identity, self.nonce)


def padded(what: str, text: str, size: int) -> bytes:
    """Raises InvalidRequest."""
    data = text.encode()
    if not data or len(data) > size or 0 in data:
        raise InvalidRequest(f"a {what} has 1 to {size} bytes, got {text[:80]!r}")
    return data.ljust(size, b"\0")


def _text(field: bytes) -> str:
    try:
        return field.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise HandshakeRefused("a name in the handshake is no text", reason="malformed") from None


def unpack_hello(data: bytes) -> Hello:
    """Raises HandshakeRefused (malformed). Does not check the version."""
    magic, version, key_id, identity, expect, nonce = _HELLO.unpack(data)
    if magic != MAGIC:
        raise HandshakeRefused("not a client of the data plane", reason="malformed")
    return Hello(version, _text(key_id), _text(identity), _text(expect), nonce)


def unpack_reply(data: bytes) -> tuple[Reply, bytes]:
    """Reply and proof. Raises HandshakeRefused (malformed)."""
    magic, version, verdict, identity, nonce = _REPLY.unpack(data[: _REPLY.size])
    if magic != MAGIC:
        raise HandshakeRefused("not a server of the data plane", reason="malformed")
    return Reply(version, verdict, _text(identity), nonce), data[_REPLY.size :]


def server_proof(secret: bytes, hello: bytes, reply: bytes) -> bytes:
    return hmac.digest(secret, b"kvfleet data plane, server\0" + hello + reply, "sha256")


def client_proof(secret: bytes, hello: bytes, reply: bytes) -> bytes:
    return hmac.digest(secret, b"kvfleet data plane, client\0" + hello + reply, "sha256")
