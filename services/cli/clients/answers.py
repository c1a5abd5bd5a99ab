"""How the command line asks an ingress, and what is answered where one should be: any server may be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from httpx_sse import EventSource

from kvfleet.cli.console import fail, printable


class Unreadable(Exception):
    """No ingress answers so. One line that says where."""


class AnswerRefused(Exception):
    """The ingress answered, and not with what was asked for."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(error_text(answer))
        self.status = answer.status_code


TROUBLES = (httpx.HTTPError, AnswerRefused, Unreadable)


def told(url: str, error: Exception) -> str:
    return f"{url}: {error or type(error).__name__}" if isinstance(error, httpx.HTTPError) else str(error)


def client(api_key: str | None, *, timeout: httpx.Timeout | float = 10.0) -> httpx.Client:
    """Goes to the ingress itself, whatever proxies the environment names."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(timeout=timeout, trust_env=False, headers=headers)


def get(http: httpx.Client, url: str, *good: int) -> Any:
    """The answer's JSON, if its status is 200 or one of these. Raises one of the TROUBLES."""
    answer = http.get(url)
    if answer.status_code not in (200, *good):
        raise AnswerRefused(answer)
    try:
        return answer.json()
    except ValueError:
        raise Unreadable(f"{answer.url} answers no JSON: is an ingress there?") from None


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
def shaped_as_an_ingress_says(url: str) -> Iterator[None]:
    """While an answer is taken apart. Raises Unreadable for one without what an ingress says, or with it otherwise."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise Unreadable(f"{url} answers as no ingress of this version does ({why}): is one there?") from None


@contextmanager
def asking(url: str) -> Iterator[None]:
    """A command that asks, and shows what is answered: it fails in one line."""
    try:
        with shaped_as_an_ingress_says(url):
            yield
    except TROUBLES as error:
        fail(told(url, error))
