"""Refuses requests that a browser made for the page of another site. Pure.

Every page in a browser on the same machine can reach an ingress without keys: with a form (cross-site), or under a name
of its own that points to the ingress (DNS rebinding). With keys a page has nothing to send; only hosts are checked.

Browsers send the name in the address bar as `Host`, `Origin` with every cross-site POST, and `Sec-Fetch-Site` with all
else on https and loopback. curl and SDKs send neither of the last two. An address cannot be rebound as a name can.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.settings import WebRules
from kvproto.errors import MisdirectedRequest, PermissionDenied

ANY = "*"
SAME = ("same-origin", "none")  # none: the user typed the address


class WebGuard:
    """`is_open`: the ingress has no keys."""

    def __init__(self, rules: WebRules, *, is_open: bool) -> None:
        said = rules.allowed_hosts
        self._hosts = {name.lower() for name in (*rules.own_hosts, *(said or ()))}
        self._any_host = ANY in self._hosts or (said is None and not is_open)
        self._origins = {origin.lower() for origin in rules.cors_origins}
        self._is_open = is_open

    def check(self, exchange: Exchange) -> None:
        """Raises MisdirectedRequest (421) for a host that is not served, PermissionDenied (403) for another site's
        page."""
        host = (exchange.header(b"host") or "").lower()
        if host and not self._any_host and not self._is_served(name_of(host)):
            raise MisdirectedRequest(
                "an address, localhost or a name of --allowed-hosts is served here, and this is none", field="host"
            )
        if self._is_open:
            self._check_page(exchange, host)

    def _is_served(self, name: str) -> bool:
        if name == "localhost" or name.endswith(".localhost") or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _check_page(self, exchange: Exchange, host: str) -> None:
        origin, site = exchange.header(b"origin"), exchange.header(b"sec-fetch-site")
        if origin is not None:
            if not self._may_ask(origin.lower(), host):
                raise PermissionDenied(
                    "pages of another site may not ask an ingress without API keys, but those of --cors-origins",
                    field="origin",
                )
        elif site is not None and site not in SAME:
            raise PermissionDenied("another site's page asks, and there are no API keys here", field="sec-fetch-site")
        if (origin is not None or site is not None) and exchange.method == "POST":
            kind = (exchange.header(b"content-type") or "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise PermissionDenied("a browser's request must be of application/json", field="content-type")

    def _may_ask(self, origin: str, host: str) -> bool:
        return ANY in self._origins or origin in self._origins or (bool(host) and urlsplit(origin).netloc == host)


def name_of(host: str) -> str:
    """A Host header without its port: `::1` of `[::1]:8080`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).rstrip(".")
