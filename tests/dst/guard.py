"""Nothing real below the simulation: while a run goes on, a real socket, process, file written or source of chance
raises, and no module has kept a real clock.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from tests.dst import threads

FORBIDDEN = ("socket.", "subprocess.", "os.fork", "os.posix_spawn", "os.system", "os.exec")
CHANCE = ("/dev/urandom", "/dev/random")
APART = (  # ours, which replaces them, where they are from, and what no part of the fleet calls
    "tests.dst.threads", "time", "posix", "subprocess", "urllib.request", "aiohttp.connector",
)  # fmt: skip


class RealThing(Exception):
    """Something of the machine was touched."""


_active: list[bool] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _active:
        return
    if event == "open":
        path, mode = str(args[0]), str(args[1] or "")
        if path not in CHANCE and not set(mode) & set("wax+"):
            return
    elif not event.startswith(FORBIDDEN):
        return
    raise RealThing(f"{event} {args!r}"[:300])


def begin() -> None:
    """From now on in this process, for good."""
    if not _active:
        sys.addaudithook(_hook)
        _active.append(True)


def kept_clocks() -> Iterator[str]:
    """Where a real clock is still to be had, in a module or a class of one."""
    real = {id(one): name for name, one in threads.REAL.items()}
    for name, module in list(sys.modules.items()):
        if name in APART or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if id(value) in real:
                yield f"{name}.{key} is the real {real[id(value)]}"
            if isinstance(value, type) and value.__module__ == name:
                kept = [attribute for attribute, one in vars(value).items() if id(one) in real]
                yield from (f"{name}.{key}.{attribute} is a real clock" for attribute in kept)


def main() -> int:
    """What is real after the product is imported, one a line."""
    found = list(kept_clocks())
    begin()
    for touch in (_socket, _urandom, _process, _file):
        try:
            touch()
        except RealThing:
            continue
        found.append(f"{touch.__name__[1:]} is not guarded")
    print("\n".join(found))
    return len(found)


def _socket() -> None:
    import _socket

    _socket.socket()


def _urandom() -> None:
    open(CHANCE[0], "rb").close()


def _process() -> None:
    import subprocess

    subprocess.Popen(["true"])


def _file() -> None:
    open("/tmp/real", "w").close()
