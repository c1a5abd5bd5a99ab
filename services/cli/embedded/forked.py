"""Wiring of a process that becomes each service of a machine's fleet: `kvfleet up` starts them so.

What all of them import is imported once and shared.
"""

from __future__ import annotations

import gc
import socket
import sys
from importlib import import_module

from kvservice import fork_server

SHARED = (
    "kvproto.client", "kvproto.dataplane.server", "kvservice.data_plane", "kvservice.lifecycle", "kvservice.logs",
    "kvservice.membership", "kvservice.probes", "kvservice.settings",
    "kvservice.tracing_start",
)  # fmt: skip


def main() -> None:
    gc.disable()  # nothing of what is imported is garbage
    for module in SHARED:
        import_module(module)
    fork_server.serve(socket.socket(fileno=int(sys.argv[1])))
