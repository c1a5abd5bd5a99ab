"""Requests to an ingress and its answers. Any server may be at the address, so every answer is checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from httpx_sse import EventSource

from kvfleet.cli.console import fail, printable


class AnswerFailed(Exception):
    """No usable answer. One line that names the address."""


class AnswerRefused(AnswerFailed):
    """The ingress answered with an error; the line is its message."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(error_text(answer))
        self.status = answer.status_code


def client(api_key: str | None, *, timeout: httpx.Timeout | float = 10.0) -> httpx.Client:
    """Connects to the ingress itself, whatever proxies the environment names."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(timeout=timeout, trust_env=False, headers=headers)


def get(http: httpx.Client, url: str, *good: int) -> Any:
    """The answer's JSON, if its status is 200 or one of `good`. Raises AnswerFailed, httpx.HTTPError."""
    answer = http.get(url)
    if answer.status_code not in (200, *good):
        raise AnswerRefused(answer)
    try:
        return answer.json()
    except ValueError:
        raise AnswerFailed(f"{answer.url} answers no JSON: is an ingress there?") from None


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Each event's JSON object; comments are skipped, `[DONE]` ends. Raises AnswerRefused."""
    if response.status_code != 200:
        raise AnswerRefused(response)
    for event in EventSource(response).iter_sse():
        if event.data == "[DONE]":
            return
        yield event.json()


def error_text(response: httpx.Response) -> str:
    """The message of an error response, whatever its shape; printable."""
    response.read()
    try:
        error = response.json()["error"]
        return printable(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Around a request and the use of its answer. Raises AnswerFailed, also for an answer of another shape."""
    try:
        yield
    except httpx.HTTPError as error:
        raise AnswerFailed(f"{url}: {error or type(error).__name__}") from None
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise AnswerFailed(f"{url} answers as no ingress of this version does ({why}): is one there?") from None


@contextmanager
def asking(url: str) -> Iterator[None]:
    """`reading` for a whole command, which fails in one line."""
    try:
        with reading(url):
            yield
    except AnswerFailed as error:
        fail(str(error))
