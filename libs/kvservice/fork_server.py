"""Adapter: a process that has imported what several others need, and becomes each of them when it is asked to.

    owner ── argv, env ──▶ fork ── pid ──▶ owner ... that process ends ── pid, code ──▶ owner

The memory of what was imported is shared between all of them, and the time is spent once. A fork copies one thread
only, so nothing that starts threads may run before. The owner is at the other end of a socket pair; messages are JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

LOOK_EVERY_S = 0.05
LARGEST_MESSAGE = 1 << 18
PR_SET_PDEATHSIG = 1


def serve(channel: socket.socket, become: Callable[[list[str]], None]) -> None:
    """Until the owner is gone. In a process of its own `become` is called with the flags that were asked for, and the
    environment; its return is that process's end."""
    gc.freeze()  # what is there stays: collecting it would touch, and so copy, the pages that are shared
    while True:
        readable, _, _ = select.select([channel], [], [], LOOK_EVERY_S)
        if readable:
            wanted = channel.recv(LARGEST_MESSAGE)
            if not wanted:
                return None
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                channel.close()
                return _become(server, json.loads(wanted), become)
            channel.send(json.dumps({"pid": pid}).encode())
        while (ended := _reaped()) is not None:
            channel.send(json.dumps({"ended": ended[0], "code": ended[1]}).encode())


def _reaped() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _become(server: int, wanted: dict[str, Any], become: Callable[[list[str]], None]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server:  # it ended before the kernel was told to tell
        return
    os.environ.clear()
    os.environ.update(wanted["env"])
    gc.enable()
    become([*wanted["argv"], f"--parent-pid={server}"])
