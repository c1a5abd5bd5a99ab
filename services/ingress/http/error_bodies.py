"""Errors as HTTP clients read them: OpenAI's body, a status, headers. Pure."""

from __future__ import annotations

import math

import orjson

from kvfleet.ingress.http.answer_types import Described
from kvproto.errors import Draining, KvfleetError, RequestTimeout

Headers = list[tuple[bytes, bytes]]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ToldError(Described):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Described):
    error: ToldError


def status_of(error: KvfleetError) -> int:
    """499 (the caller cancelled) is no status of HTTP: this side cancelled a caller that still listens."""
    return 503 if error.http_status == 499 else error.http_status


def error_body(error: KvfleetError) -> bytes:
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return orjson.dumps(ErrorAnswer(ToldError(str(error), kind, error.field, error.code)))


def error_headers(error: KvfleetError) -> Headers:
    """Retry-After in whole seconds, and x-should-retry, which OpenAI's clients obey: they would repeat everything from
    500 up. Closes the connection to an ingress that drains, and one whose request's body is still coming."""
    status = status_of(error)
    if status == 401:
        return [(b"www-authenticate", b"Bearer")]
    headers: Headers = []
    again = status in (429, 503) or error.retry_after_s is not None
    if again:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or 1.0))))
    if again or status >= 500:
        headers.append((b"x-should-retry", b"true" if again else b"false"))
    if isinstance(error, Draining | RequestTimeout):
        headers.append((b"connection", b"close"))
    return headers


def loggable(error: KvfleetError) -> str:
    """For logs: only code and field of errors about a caller's words, as the message may repeat them."""
    if error.field is not None:
        return f"{error.code} ({error.field})"
    return error.message if error.http_status >= 500 else error.code
