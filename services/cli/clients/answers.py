"""What was answered where an ingress should be: any server may be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from kvfleet.cli.console import fail


class Unreadable(Exception):
    """No ingress answers so. One line that says where."""


def json_of(answer: httpx.Response) -> Any:
    """Raises Unreadable."""
    try:
        return answer.json()
    except ValueError:
        raise Unreadable(f"{answer.url} answers no JSON: is an ingress there?") from None


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
    except httpx.HTTPError as error:
        fail(f"{url}: {error or type(error).__name__}")
    except Unreadable as error:
        fail(str(error))
