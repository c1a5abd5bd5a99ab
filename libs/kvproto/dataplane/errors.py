"""Errors of the data plane: a branch of `kvproto.errors`. Plain.

DataPlaneError            503  this connection is of no further use
├── HandshakeRefused      401  an end could not prove itself, or is not the expected one
├── PeerTimeout           504  the operation's deadline passed
├── PeerGone              503  the connection ended, or could not be made
└── ProtocolError         502  malformed or too many bytes
"""

from __future__ import annotations

from kvproto.errors import KvfleetError


class DataPlaneError(KvfleetError, code="data_plane", http_status=503, retryable=True):
    """`reason` is a label of metrics: unknown_key, bad_proof, server_proof, identity, version, busy, malformed, tls (of
    a HandshakeRefused); malformed, too_large, store, key_withdrawn (of a ProtocolError)."""

    def __init__(self, message: str, *, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class HandshakeRefused(DataPlaneError, code="data_plane_refused", http_status=401): ...


class PeerTimeout(DataPlaneError, code="data_plane_timeout", http_status=504): ...


class PeerGone(DataPlaneError, code="data_plane_gone"): ...


class ProtocolError(DataPlaneError, code="data_plane_protocol", http_status=502): ...
