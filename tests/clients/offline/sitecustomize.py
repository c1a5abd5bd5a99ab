"""Python imports this before a client runs: no socket of its process, or of one below it, may leave the machine.

An attempt is refused, and written down for the test. What a library of C does with sockets of its own is not seen.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from typing import Any

_OWN_NAMES = {None, "", b"", "localhost", b"localhost", socket.gethostname()}


def _is_here(host: Any) -> bool:
    if host in _OWN_NAMES:
        return True
    try:
        address = ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _refuse_others(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(arguments[1], tuple):  # others are sockets of files
        host = arguments[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if not _is_here(host):
        with open(os.environ["KVFLEET_OUTSIDE"], "a") as outside:
            print(event, host, file=outside)
        raise PermissionError(f"{event} {host}: a client under test talks to this machine alone")


sys.addaudithook(_refuse_others)
