"""Both ends prove that they hold a key, over a fresh link. `handshake_bytes` has the bytes.

client: none ──Hello──▶ asked ──Reply, proof right──▶ proven ──WELCOME──▶ authenticated
server: none ──Hello──▶ heard ──proof right──▶ authenticated
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable

from kvproto.dataplane import handshake_bytes
from kvproto.dataplane.errors import HandshakeRefused
from kvproto.dataplane.handshake_bytes import HandshakeVerdict, Hello, Reply
from kvproto.dataplane.keys import Key, KeyRing
from kvproto.dataplane.link import Link


def ask(link: Link, key: Key, *, identity: str, expect: str, deadline: float) -> int:
    """The client's side: the newest version that the server reads. Raises HandshakeRefused, PeerTimeout, PeerGone."""
    hello = Hello(
        handshake_bytes.VERSION, key.id, identity, expect, secrets.token_bytes(handshake_bytes.NONCE_BYTES)
    ).packed()
    link.send([hello], deadline)
    data = link.receive(handshake_bytes.REPLY_BYTES, deadline)
    reply, proof = handshake_bytes.unpack_reply(data)
    _check_verdict(reply.verdict, reply.version, expect)
    packed = data[: -handshake_bytes.PROOF_BYTES]
    if not hmac.compare_digest(proof, handshake_bytes.server_proof(key.secret, hello, packed)):
        raise HandshakeRefused(f"who answers for {expect} does not hold the key {key.id}", reason="server_proof")
    if reply.identity != expect:
        raise HandshakeRefused(f"{reply.identity} answers where {expect} was expected", reason="identity")
    link.send([handshake_bytes.client_proof(key.secret, hello, packed)], deadline)
    _check_verdict(link.receive(1, deadline)[0], reply.version, expect)
    return reply.version


def _check_verdict(verdict: int, version: int, expect: str) -> None:
    if verdict == HandshakeVerdict.WELCOME:
        return
    reason = HandshakeVerdict(verdict).reason if verdict in set(HandshakeVerdict) else "malformed"
    detail = f" (it speaks version {version}, this client {handshake_bytes.VERSION})"
    said = f"{expect} refuses: {reason}{detail if verdict == HandshakeVerdict.VERSION else ''}"
    raise HandshakeRefused(said, reason=reason)


def answer(link: Link, ring: KeyRing, *, identity: str, admit: Callable[[], bool], deadline: float) -> Hello:
    """The server's side: the client's Hello. `admit` is called for an authenticated client; False: no room. Raises
    HandshakeRefused (the client has been told why), PeerTimeout, PeerGone."""
    data = link.receive(handshake_bytes.HELLO_BYTES, deadline)
    hello = handshake_bytes.unpack_hello(data)
    secret = ring.get(hello.key_id)
    verdict = HandshakeVerdict.WELCOME
    if hello.version != handshake_bytes.VERSION:
        verdict = HandshakeVerdict.VERSION
    elif secret is None:
        verdict = HandshakeVerdict.UNKNOWN_KEY
    elif hello.expect != identity:
        verdict = HandshakeVerdict.IDENTITY
    version = handshake_bytes.NEWEST if verdict == HandshakeVerdict.WELCOME else handshake_bytes.VERSION
    reply = Reply(version, verdict, identity, secrets.token_bytes(handshake_bytes.NONCE_BYTES)).packed()
    if secret is None or verdict != HandshakeVerdict.WELCOME:
        link.send([reply, bytes(handshake_bytes.PROOF_BYTES)], deadline)
        raise HandshakeRefused(f"{hello.identity!r} was refused: {verdict.reason}", reason=verdict.reason)
    link.send([reply, handshake_bytes.server_proof(secret, data, reply)], deadline)
    proof = link.receive(handshake_bytes.PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, handshake_bytes.client_proof(secret, data, reply)):
        verdict = HandshakeVerdict.BAD_PROOF
    elif not admit():
        verdict = HandshakeVerdict.BUSY
    link.send([bytes([verdict])], deadline)
    if verdict != HandshakeVerdict.WELCOME:
        raise HandshakeRefused(f"{hello.identity!r} was refused: {verdict.reason}", reason=verdict.reason)
    return hello
