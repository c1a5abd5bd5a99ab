"""Serves the dashboard: the files beside this one, read once, with headers that hold a browser to them. The page asks
the public routes with the key that its reader typed in; serving it needs neither a key nor NATS."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from kvfleet.ingress.fleet.routes import no_such_route
from kvfleet.ingress.http.error_bodies import Headers
from kvfleet.ingress.http.exchange import Exchange

INDEX = "index.html"
TYPES = {  # of all files that are served
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
}
# Nothing but the page's own script and style, no text that becomes markup, no frame around it.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Headers = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # the files belong together
]


def suffix(name: str) -> str:
    return PurePosixPath(name).suffix


def read_files(folder: Traversable) -> dict[str, bytes]:
    """Name to bytes of the page's files in `folder`, but not below it."""
    return {one.name: one.read_bytes() for one in folder.iterdir() if suffix(one.name) in TYPES and one.is_file()}


class Dashboard:
    """Reads its files once; a request's path is only looked up among them."""

    def __init__(self) -> None:
        self._files = read_files(resources.files("kvfleet.ingress.dashboard"))

    async def index(self, exchange: Exchange) -> None:
        await self._respond(exchange, INDEX)

    async def file(self, exchange: Exchange) -> None:
        name = exchange.path_params["file"]
        if name == INDEX or name not in self._files:
            await no_such_route(exchange)
            return
        await self._respond(exchange, name)

    async def _respond(self, exchange: Exchange, name: str) -> None:
        await exchange.respond(200, self._files[name], content_type=TYPES[suffix(name)], headers=HEADERS)
