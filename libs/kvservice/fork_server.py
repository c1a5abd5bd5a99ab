"""Adapter: a process that forks others, which share its imports.

    owner ── module, argv, env, a socket ──▶ fork ── pid ──▶ owner ... that process ends ── pid, code ──▶ owner

A fork copies one thread only, so nothing that starts threads may run before. The owner is at the other end of a socket
pair; messages are JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import setproctitle

from kvservice import launch

LOOK_EVERY_S = 0.05
LARGEST_MESSAGE = 1 << 18
PR_SET_PDEATHSIG = 1


def start_module(module: str, flags: list[str]) -> None:
    """Runs the module here as `launch.command` would, also in `ps`."""
    setproctitle.setproctitle(" ".join(launch.command(module, *flags)))
    sys.argv[1:] = [module, *flags]
    launch.main()


def serve(channel: socket.socket, become: Callable[[str, list[str]], None] = start_module) -> None:
    """Until the owner is gone. Each fork calls `become` with a module and its flags, in the environment that the owner
    sent, with the owner's socket, if any, under the same number; the fork ends when that returns."""
    setproctitle.getproctitle()  # it locates the title by the environment, which `_become` replaces
    gc.freeze()  # a collection would touch, and so copy, the shared pages
    while True:
        readable, _, _ = select.select([channel], [], [], LOOK_EVERY_S)
        if readable:
            wanted, received, _, _ = socket.recv_fds(channel, LARGEST_MESSAGE, 1)
            if not wanted:
                return None
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                channel.close()
                return _become(server, json.loads(wanted), received, become)
            for number in received:
                os.close(number)
            channel.send(json.dumps({"pid": pid}).encode())
        while (ended := _reaped()) is not None:
            channel.send(json.dumps({"ended": ended[0], "code": ended[1]}).encode())


def _reaped() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _become(server: int, wanted: dict[str, Any], received: list[int], become: Callable[[str, list[str]], None]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server:  # the server ended before the kernel could signal its end
        return
    for number in received:
        if number != wanted["socket"]:
            os.dup2(number, wanted["socket"], inheritable=False)
            os.close(number)
    os.environ.clear()
    os.environ.update(wanted["env"])
    gc.enable()
    become(wanted["module"], [*wanted["argv"], f"--parent-pid={server}"])
