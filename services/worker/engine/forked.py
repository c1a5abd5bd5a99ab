"""Wiring of a process that becomes a worker as often as its owner asks: `kvfleet up` starts those of one machine so.

What takes most of a worker's start, importing torch and transformers, is done once and shared.
"""

from __future__ import annotations

import gc
import socket
import sys
from importlib import import_module

from kvfleet.worker.engine.engine_factory import import_torch
from kvservice import fork_server


def main() -> None:
    gc.disable()  # nothing of what is imported is garbage
    channel = socket.socket(fileno=int(sys.argv[1]))
    import_module("kvfleet.worker.main")
    import_torch()
    fork_server.serve(channel)
