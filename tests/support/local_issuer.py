"""An OIDC issuer on this host: real keys, a real HTTP server, tokens as wrong as a test wants them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

AUDIENCE = "kvfleet"
SIGNERS = {"RS256": RSAAlgorithm, "ES256": ECAlgorithm, "EdDSA": OKPAlgorithm}


@cache
def private_key(algorithm: str, kid: str = "") -> Any:
    """Made once for all tests."""
    if algorithm == "RS256":
        return rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return ec.generate_private_key(ec.SECP256R1()) if algorithm == "ES256" else ed25519.Ed25519PrivateKey.generate()


def public_jwk(algorithm: str, kid: str) -> dict[str, Any]:
    jwk: dict[str, Any] = json.loads(SIGNERS[algorithm].to_jwk(private_key(algorithm, kid).public_key()))  # type: ignore[attr-defined]
    return {**jwk, "kid": kid, "use": "sig", "alg": algorithm}


def public_pem(algorithm: str, kid: str) -> bytes:
    pem: bytes = private_key(algorithm, kid).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem


def token(issuer: str, *, algorithm: str = "RS256", kid: str = "k1", head: Any = None, **claims: Any) -> str:
    """A good one unless claims (None: without it) or the head say otherwise."""
    now = int(time.time())
    said = {"iss": issuer, "aud": AUDIENCE, "sub": "someone", "tenant": "acme", "iat": now, "exp": now + 60, **claims}
    said = {name: value for name, value in said.items() if value is not None}
    return jwt.encode(said, private_key(algorithm, kid), algorithm, {"kid": kid} if head is None else head)


def hmac_token(issuer: str, secret: bytes, kid: str) -> str:
    """Signed with HS256; PyJWT itself refuses to do that with a public key."""

    def part(value: Any) -> bytes:
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        return base64.urlsafe_b64encode(raw).rstrip(b"=")

    now = int(time.time())
    claims = {"iss": issuer, "aud": AUDIENCE, "sub": "someone", "tenant": "acme", "exp": now + 60}
    said = part({"alg": "HS256", "typ": "JWT", "kid": kid}) + b"." + part(claims)
    return (said + b"." + part(hmac.new(secret, said, hashlib.sha256).digest())).decode()


class LocalIssuer:
    """`keys` are what it publishes; `away`: it answers nothing but errors."""

    def __init__(self) -> None:
        self.keys = [public_jwk("RS256", "k1")]
        self.away = False
        self.described: dict[str, Any] = {}
        self.redirect: str | None = None
        self.asked: list[str] = []
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked.append(self.path)
                if issuer.away:
                    self.send_error(500)
                    return
                if issuer.redirect is not None:
                    self.send_response(302)
                    self.send_header("Location", issuer.redirect)
                    self.end_headers()
                    return
                description = {"issuer": issuer.url, "jwks_uri": issuer.url + "/keys", **issuer.described}
                value = {"keys": issuer.keys} if self.path == "/keys" else description
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
