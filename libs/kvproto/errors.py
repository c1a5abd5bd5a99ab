"""The one error tree. It knows nothing of HTTP frameworks or NATS; edges translate `code` and `http_status`.

KvfleetError
├── InvalidRequest            400  the caller sent something wrong; `field` names it
│   ├── CodecError            400  bytes that are not the message they should be
│   │   ├── UnknownEnumValue  400  an enumeration value this version does not know
│   │   └── VersionMismatch   400  written in a version that this reader does not accept
│   └── ContextLengthExceeded 400  prompt and max_tokens do not fit the model's context
├── AuthenticationFailed      401
├── PermissionDenied          403
├── NotFound                  404
│   ├── ModelNotFound         404
│   └── SessionNotFound       404
├── RequestTimeout            408  the request's body did not come in time
├── SessionBusy               409  another turn of this session is running
├── PromptChanged             409  a stream that was begun from another prompt: it cannot be gone on with here
├── PayloadTooLarge           413
├── MisdirectedRequest        421  a host name that this ingress does not serve
├── RequestMismatch           422  a request id or Idempotency-Key that was used for another request
├── LimitExceeded             429  a tenant's own limit; Retry-After says when
├── Cancelled                 499  the client asked for it or left
├── UnsupportedModel          501  the model has a feature the engine would compute wrongly
├── Unavailable               503  retryable
│   ├── NoWorkers             503  no live worker serves this model
│   ├── Overloaded            503  it would wait for too long; `retry_after_s` says when it would not
│   ├── OutOfMemory           503  this worker cannot hold the sequence
│   ├── WorkerLost            503  the worker is gone, or forgot the request
│   ├── Draining              503  the worker takes no new work
│   └── EngineFailure         503  a step of the engine raised
└── DeadlineExceeded          504
"""

from __future__ import annotations

EXPIRES = "expires_unix_ms"  # the field of a refusal by the clock: two processes' clocks may disagree


class KvfleetError(Exception):
    """Base of all errors that cross a process: `code` on the wire, `http_status` at the ingress. `field` names the
    offending field of the request. `retryable`: the same request may succeed on another worker."""

    code = "internal_error"
    http_status = 500
    retryable = False

    def __init_subclass__(cls, *, code: str = "", http_status: int = 0, retryable: bool = False) -> None:
        cls.code = code or cls.code
        cls.http_status = http_status or cls.http_status
        cls.retryable = retryable or cls.retryable

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidRequest(KvfleetError, code="invalid_request", http_status=400): ...


class CodecError(InvalidRequest, code="malformed_message"): ...


class UnknownEnumValue(CodecError, code="unknown_enum_value"): ...


# `retryable`: by another worker, or by the same one in an older version.
class VersionMismatch(CodecError, code="version_mismatch", retryable=True): ...


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"): ...


class AuthenticationFailed(KvfleetError, code="authentication_failed", http_status=401): ...


class PermissionDenied(KvfleetError, code="permission_denied", http_status=403): ...


class NotFound(KvfleetError, code="not_found", http_status=404): ...


class ModelNotFound(NotFound, code="model_not_found"): ...


class SessionNotFound(NotFound, code="session_not_found"): ...


class RequestTimeout(KvfleetError, code="request_timeout", http_status=408): ...


class SessionBusy(KvfleetError, code="session_busy", http_status=409): ...


class PromptChanged(KvfleetError, code="prompt_changed", http_status=409): ...


class PayloadTooLarge(KvfleetError, code="payload_too_large", http_status=413): ...


class MisdirectedRequest(KvfleetError, code="misdirected_request", http_status=421): ...


class RequestMismatch(KvfleetError, code="request_mismatch", http_status=422): ...


class LimitExceeded(KvfleetError, code="limit_exceeded", http_status=429): ...


class Cancelled(KvfleetError, code="cancelled", http_status=499): ...


class UnsupportedModel(KvfleetError, code="unsupported_model", http_status=501): ...


class Unavailable(KvfleetError, code="unavailable", http_status=503, retryable=True): ...


class NoWorkers(Unavailable, code="no_workers"): ...


class Overloaded(Unavailable, code="overloaded"): ...


class OutOfMemory(Unavailable, code="out_of_memory"): ...


class WorkerLost(Unavailable, code="worker_lost"): ...


class Draining(Unavailable, code="draining"): ...


class EngineFailure(Unavailable, code="engine_failure"): ...


class DeadlineExceeded(KvfleetError, code="deadline_exceeded", http_status=504): ...


def _tree(root: type[KvfleetError]) -> dict[str, type[KvfleetError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE = _tree(KvfleetError)


def from_code(code: str, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> KvfleetError:
    """The error that a `Failed` frame stands for; a code of a newer version becomes the base class."""
    return BY_CODE.get(code, KvfleetError)(message, field=field, retry_after_s=retry_after_s)
