"""Wiring of a process from which `kvfleet up` forks workers: they share one import of torch and transformers."""

from __future__ import annotations

import gc
import socket
import sys
from importlib import import_module

from kvfleet.worker.engine.engine_factory import import_torch
from kvservice import fork_server


def main() -> None:
    gc.disable()  # imports make no garbage
    channel = socket.socket(fileno=int(sys.argv[1]))
    import_module("kvfleet.worker.main")
    import_module("kvfleet.worker.own_backend")
    import_torch()
    fork_server.serve(channel)
