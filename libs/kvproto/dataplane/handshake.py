"""Both ends prove that they hold a key, over a fresh link. See `wire` for the bytes and what they protect against.

client: none ──Hello──▶ asked ──Reply, proof right──▶ proven ──WELCOME──▶ authenticated
server: none ──Hello──▶ heard ──proof right──▶ authenticated
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable

from kvproto.dataplane import wire
from kvproto.dataplane.errors import HandshakeRefused
from kvproto.dataplane.keys import Key, KeyRing
from kvproto.dataplane.link import Link
from kvproto.dataplane.wire import HandshakeVerdict, Hello, Reply


def ask(link: Link, key: Key, *, identity: str, expect: str, deadline: float) -> int:
    """The client's side; returns the newest version that the server reads. Raises HandshakeRefused, PeerTimeout,
    PeerGone."""
    hello = Hello(wire.VERSION, key.id, identity, expect, secrets.token_bytes(wire.NONCE_BYTES)).packed()
    link.send([hello], deadline)
    data = link.receive(wire.REPLY_BYTES, deadline)
    reply, proof = wire.unpack_reply(data)
    _check_verdict(reply.verdict, reply.version, expect)
    packed = data[: -wire.PROOF_BYTES]
    if not hmac.compare_digest(proof, wire.server_proof(key.secret, hello, packed)):
        raise HandshakeRefused(f"who answers for {expect} does not hold the key {key.id}", reason="server_proof")
    if reply.identity != expect:
        raise HandshakeRefused(f"{reply.identity} answers where {expect} was expected", reason="identity")
    link.send([wire.client_proof(key.secret, hello, packed)], deadline)
    _check_verdict(link.receive(1, deadline)[0], reply.version, expect)
    return reply.version


def _check_verdict(verdict: int, version: int, expect: str) -> None:
    if verdict != HandshakeVerdict.WELCOME:
        reason = HandshakeVerdict(verdict).reason if verdict in set(HandshakeVerdict) else "malformed"
        detail = (
            f" (it speaks version {version}, this client {wire.VERSION})" if verdict == HandshakeVerdict.VERSION else ""
        )
        raise HandshakeRefused(f"{expect} refuses: {reason}{detail}", reason=reason)


def answer(link: Link, ring: KeyRing, *, identity: str, admit: Callable[[], bool], deadline: float) -> Hello:
    """The server's side: who it is. `admit` is asked once the client has proven itself; False: there is no room.

    Raises HandshakeRefused (the client has been told why), PeerTimeout, PeerGone.
    """
    data = link.receive(wire.HELLO_BYTES, deadline)
    hello = wire.unpack_hello(data)
    secret = ring.get(hello.key_id)
    verdict = HandshakeVerdict.WELCOME
    if hello.version != wire.VERSION:
        verdict = HandshakeVerdict.VERSION
    elif secret is None:
        verdict = HandshakeVerdict.UNKNOWN_KEY
    elif hello.expect != identity:
        verdict = HandshakeVerdict.IDENTITY
    version = wire.NEWEST if verdict == HandshakeVerdict.WELCOME else wire.VERSION
    reply = Reply(version, verdict, identity, secrets.token_bytes(wire.NONCE_BYTES)).packed()
    if secret is None or verdict != HandshakeVerdict.WELCOME:
        link.send([reply, bytes(wire.PROOF_BYTES)], deadline)
        raise HandshakeRefused(f"{hello.identity!r} was refused: {verdict.reason}", reason=verdict.reason)
    link.send([reply, wire.server_proof(secret, data, reply)], deadline)
    proof = link.receive(wire.PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, wire.client_proof(secret, data, reply)):
        verdict = HandshakeVerdict.BAD_PROOF
    elif not admit():
        verdict = HandshakeVerdict.BUSY
    link.send([bytes([verdict])], deadline)
    if verdict != HandshakeVerdict.WELCOME:
        raise HandshakeRefused(f"{hello.identity!r} was refused: {verdict.reason}", reason=verdict.reason)
    return hello
